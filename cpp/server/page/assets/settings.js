// What the user chose for the next answers, kept in this browser, and what the server offers to choose from.

const NAME = "pypcd.settings";

export const DEFAULTS = {
  model: "", setting: "server", custom: {}, temperature: 0.8, top_p: 0.95, n_predict: 1024, seed: "", system: "", colours: "system",
  speeds: {}, // tokens of a prompt that were read per second, of each model
};

export function load() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch { /* of another version: the defaults */ }
  const known = Object.keys(DEFAULTS).filter(name => typeof (kept[name] ?? undefined) === typeof DEFAULTS[name]);
  return {...DEFAULTS, ...Object.fromEntries(known.map(name => [name, kept[name]]))};
}

export const save = settings => localStorage.setItem(NAME, JSON.stringify(settings));

// The numbers of a custom setting that are worth a place here; docs/settings.md says more of them.
export const NUMBERS = {
  beta: {label: "Strength (beta)", min: 0, step: "any", about: "0: no contrast"},
  relative_top: {label: "Cut (relative_top)", min: 0, max: 1, step: "any", about: "leaves out tokens below this part of the best one's probability"},
  gamma: {label: "Candidates (gamma)", min: 1, step: 1, about: "at most so many tokens are contrasted"},
  window: {label: "Window (window)", min: 0, step: 1, about: "tokens that the local evaluation sees; 0: all, where it is over-rotated"},
  min_context: {label: "From (min_context)", min: 0, step: 1, about: "tokens; a shorter text is decoded plainly"},
  min_first_entropy: {label: "Unsure from (min_first_entropy)", min: 0, step: "any", about: "bits; an answer with a surer first token is plain; 0: never"},
};

/** The models themselves: NAME:pcd and NAME:pcd-PRESET are the same ones with a setting. entries: of /v1/models. */
export function ownModels(entries) {
  const ids = new Set(entries.map(entry => String(entry.id)));
  return entries.filter(entry => !ids.has(String(entry.id).replace(/:pcd(-[^:]*)?$/, "")) || !/:pcd(-[^:]*)?$/.test(entry.id))
    .map(entry => ({id: String(entry.id), isLoaded: (entry.status?.value ?? "loaded") === "loaded"}));
}

/** The settings that may be chosen, as [value, label]; pcd is that part of /props. */
export function choices(pcd) {
  if (!pcd) return [["server", "the server's"]]; // not known before the model is loaded
  if (!pcd.presets) return [["off", "off"]];
  return [
    ["server", `the server's (${pcd.default ? nameOf(pcd) : "off"})`], ["off", "off"],
    ...Object.keys(pcd.presets).map(name => [name, name]), ["custom", "custom"],
  ];
}

/** The preset that the server's setting is. */
function nameOf(pcd) {
  const same = values => Object.entries(values).every(([name, value]) => pcd.setting[name] === value);
  return Object.entries(pcd.presets).find(([, values]) => same(values))?.[0] ?? "custom";
}

/** The setting that is chosen; the server's, where it does not have that one. "on": as the server's, and on. */
export function choiceOf(settings, pcd) {
  const values = choices(pcd).map(([value]) => value);
  return settings.setting === "on" || values.includes(settings.setting) ? settings.setting : values[0];
}

/** Settings for an answer with PCD, where none was chosen: the server's, or the recommended preset if that is off. */
export const turnedOn = (settings, pcd) =>
  pcdOf(settings, pcd) ? settings : {...settings, setting: !pcd.default && pcd.recommended in pcd.presets ? pcd.recommended : "on"};

/** The field "pcd" of a request: false, or all that a request may change. */
export function pcdOf(settings, pcd) {
  const choice = choiceOf(settings, pcd);
  if (!pcd?.presets || choice === "off" || (choice === "server" && !pcd.default)) return false;
  const own = Object.fromEntries(pcd.per_request.map(name => [name, pcd.setting[name]]));
  if (choice === "server" || choice === "on") return own;
  if (choice !== "custom") return pcd.presets[choice];
  const custom = {...own, ...customOf(settings, pcd)};
  return {...custom, window: custom.window || null};
}

/** Its name for people. */
export function labelOf(settings, pcd) {
  if (!pcdOf(settings, pcd)) return "off";
  const choice = choiceOf(settings, pcd);
  return choice === "server" || choice === "on" ? nameOf(pcd) : choice;
}

/** The custom numbers; where none was given, the server's. */
export function customOf(settings, pcd) {
  const names = Object.keys(NUMBERS).filter(name => pcd.per_request.includes(name));
  return Object.fromEntries(names.map(name => [name, typeof settings.custom[name] === "number" ? settings.custom[name] : pcd.setting[name]]));
}

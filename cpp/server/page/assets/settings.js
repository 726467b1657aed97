// What the user chose for the next answers, kept in this browser, and what the server offers to choose from.

const NAME = "pypcd.settings";

export const DEFAULTS = {
  model: "", setting: "server", custom: {}, replay: true, sampling: {}, stop: "", n_predict: 1024, seed: "", system: "", colours: "system",
};

export function load() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch { /* of another version: the defaults */ }
  const known = Object.keys(DEFAULTS).filter(name => typeof (kept[name] ?? undefined) === typeof DEFAULTS[name]);
  return structuredClone({...DEFAULTS, ...Object.fromEntries(known.map(name => [name, kept[name]]))});
}

export const save = settings => localStorage.setItem(NAME, JSON.stringify(settings));

// -- sampling ----------------------------------------------------------------------------------------------------------

// Numbers that a request may set; what is not set is left to the server.
export const SAMPLING = {
  temperature: {label: "Temperature", min: 0, max: 5, step: "any", about: "0: always the most probable token"},
  top_k: {label: "Top k", min: 0, step: 1, about: "draws from so many most probable tokens; 0: from all"},
  top_p: {label: "Top p", min: 0, max: 1, step: "any", about: "draws from the most probable tokens that have this probability together"},
  min_p: {label: "Min p", min: 0, max: 1, step: "any", about: "leaves out tokens below this part of the best one's probability"},
  repeat_penalty: {label: "Repeat penalty", min: 0.1, max: 10, step: "any", about: "1: none; above 1 what was just written becomes less probable"},
};

/** The server's own number. */
export const ownSampling = (name, props) => {
  const value = props?.default_generation_settings?.params?.[name];
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : "";
};

/** The fields of a request. */
export function samplingOf({sampling, stop}) {
  const known = Object.keys(SAMPLING).filter(name => typeof sampling[name] === "number");
  const texts = stop.split("\n").filter(Boolean);
  return {...Object.fromEntries(known.map(name => [name, sampling[name]])), ...(texts.length ? {stop: texts} : {})};
}

// -- models ------------------------------------------------------------------------------------------------------------

/** The models themselves: NAME:pcd and NAME:pcd-PRESET are the same ones with a setting. entries: of /v1/models. */
export function ownModels(entries) {
  const ids = new Set(entries.map(entry => String(entry.id)));
  return entries.filter(entry => !ids.has(String(entry.id).replace(/:pcd(-[^:]*)?$/, "")) || !/:pcd(-[^:]*)?$/.test(entry.id))
    .map(entry => ({id: String(entry.id), isLoaded: (entry.status?.value ?? "loaded") === "loaded"}));
}

// -- PCD ---------------------------------------------------------------------------------------------------------------

// In the order in which they are offered; the server may have others.
const ABOUT = {
  off: "Plain decoding.",
  unsure: "Contrasts only if the text has 300 tokens or more and the model is unsure how to begin the answer. Changes the fewest answers.",
  cautious: "A milder form of the paper's setting, which lifts no improbable token.",
  window: "The second evaluation sees the last 64 tokens only. Finds more in long texts; spoils more of the other answers.",
  paper: "The paper's setting, the strongest. Small models may write gibberish.",
  custom: "Values of your own.",
};

// The values of a custom setting, by their names in a request; docs/settings.md says more of them.
export const VALUES = {
  beta: {label: "Strength", min: 0, max: 1000, step: "any", about: "0: no contrast"},
  relative_top: {label: "Cut", min: 0, max: 1, step: "any", about: "leaves out tokens below this part of the best one's probability"},
  gamma: {label: "Candidates", min: 1, step: 1, about: "at most so many tokens are contrasted"},
  perturbation: {label: "Rotation", about: "what is done to the second evaluation; none: it differs by its window alone"},
  window: {label: "Window", min: 0, step: 1, about: "tokens that the second evaluation sees; 0: all"},
  n_sink: {label: "First tokens", min: 0, step: 1, about: "with a window: so many first tokens are seen too"},
  min_context: {label: "From", min: 0, step: 1, about: "tokens; a shorter text is decoded plainly"},
  min_entropy: {label: "Unsure step", min: 0, max: 100, step: "any", about: "bits; a surer step is decoded plainly; 0: none"},
  min_first_entropy: {label: "Unsure answer", min: 0, max: 100, step: "any", about: "bits; an answer with a surer first token is plain; 0: none"},
};

/** The names that a value may have; undefined: it is a number. */
export const namesOf = (name, pcd) => ({
  perturbation: [...new Set([pcd.setting.perturbation, "none"])],
})[name];

/** The settings that may be chosen, as {value, label, about}; pcd is that part of /props. */
export function choices(pcd) {
  if (!pcd) return [{value: "server", label: "the server's", about: "Known when the model is loaded."}];
  if (!pcd.presets) return [{value: "off", label: "off", about: `PCD cannot run here: ${pcd.refusal}.`}];
  const own = pcd.default ? nameOf(pcd) : "off";
  const presets = Object.keys(ABOUT).filter(name => name in pcd.presets);
  presets.push(...Object.keys(pcd.presets).filter(name => !presets.includes(name)));
  return [
    {value: "server", label: `the server's (${own})`, about: `${pcd.default ? "" : ABOUT.off + " "}The setting that the server was started with.`},
    ...[...(pcd.default ? ["off"] : []), ...presets, "custom"].map(name => ({value: name, label: name, about: ABOUT[name] ?? ""})),
  ];
}

/** The preset that the server's setting is. */
function nameOf(pcd) {
  const same = values => Object.entries(values).every(([name, value]) => pcd.setting[name] === value);
  return Object.entries(pcd.presets).find(([, values]) => same(values))?.[0] ?? "custom";
}

/** The setting that is chosen; the server's, where it does not have that one. "on": as the server's, and on. */
export function choiceOf(settings, pcd) {
  const values = choices(pcd).map(({value}) => value);
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
  if ("window" in custom) custom.window ||= null;
  return custom;
}

/** Its name for people. */
export function labelOf(settings, pcd) {
  if (!pcdOf(settings, pcd)) return "off";
  const choice = choiceOf(settings, pcd);
  return choice === "server" || choice === "on" ? nameOf(pcd) : choice;
}

/** What a custom setting begins as: what was chosen before it. */
export const firstCustom = (settings, pcd) => Object.fromEntries(Object.entries(pcdOf(turnedOn(settings, pcd), pcd))
  .map(([name, value]) => [name, value ?? (namesOf(name, pcd) ? "none" : 0)]));

/** The custom values; where none was given, those of the recommended preset. */
export function customOf(settings, pcd) {
  const names = Object.keys(VALUES).filter(name => pcd.per_request.includes(name));
  const isGiven = name => namesOf(name, pcd)?.includes(settings.custom[name]) ?? typeof settings.custom[name] === "number";
  const others = pcd.presets[pcd.recommended] ?? pcd.setting;
  return Object.fromEntries(names.map(name => [name, isGiven(name) ? settings.custom[name] : others[name]]));
}

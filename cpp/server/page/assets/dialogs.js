// The dialogs: settings, PCD, and a token with its candidates. They stay in the page and are shown by main.js, so that the browser keeps
// the focus in them and gives it back.

import {html, nothing, svg} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";
import {key} from "./api.js";
import {dialog, select} from "./parts.js";
import {choiceOf, choices, customOf, DEFAULTS, firstCustom, namesOf, ownSampling, SAMPLING, VALUES} from "./settings.js";
import {candidates, replaced, shown} from "./tokens.js";

const idOf = (...words) => words.join("-").replace(/\W+/g, "-");

const field = (label, input, about = "", shown = label) => html`<div class="field"><label for=${idOf(label)}>${shown}</label>${input}
  ${about && html`<small id=${idOf(label, "about")}>${about}</small>`}</div>`;

/** own: what holds if nothing is written. shown: the label, if it is more than a text. */
const number = (label, value, {min, max, step, about = ""}, changed, own = "", shown = label) => field(label, html`<input type="number" id=${idOf(label)}
  aria-describedby=${about ? idOf(label, "about") : nothing} min=${min} max=${max ?? nothing} step=${step} placeholder=${own || nothing} .value=${String(value)}
  @change=${({target}) => target.reportValidity() && changed(target.value)}>`, about, shown);

/** What cannot be taken is told, and stays to be mended. */
const isValid = of => [...of.querySelectorAll("input")].every(input => input.reportValidity());

const done = act => html`<div class="tools end"><button class="first" @click=${event => isValid(event.target.closest("dialog")) && act.panel(null)}>Done</button></div>`;

// -- settings ----------------------------------------------------------------------------------------------------------

export function settingsDialog(state, act) {
  const {settings, props} = state;
  const set = name => value => act.set(name, value);
  // no live() in what is typed into: a redraw, as there are many while an answer is written, would put the old value back
  const area = (label, name, rows, about = "") => field(label, html`<textarea id=${idOf(label)} rows=${rows} aria-describedby=${about ? idOf(label, "about") : nothing}
    .value=${settings[name]} @change=${event => act.set(name, event.target.value)}></textarea>`, about);
  return dialog("Settings", state.panel === "settings", () => act.panel(null), () => html`
    <h2>Settings</h2>
    ${area("System message", "system", 3)}
    <fieldset><legend>Sampling</legend>
      <p class="quiet">What is empty is left to the server, whose value is shown in grey.</p>
      ${Object.entries(SAMPLING).map(([name, range]) => number(range.label, settings.sampling[name] ?? "", range,
        value => act.set("sampling", {...settings.sampling, [name]: value === "" ? undefined : Number(value)}), ownSampling(name, props)))}
      ${number("Seed", settings.seed, {min: 0, max: 4294967295, step: 1, about: "empty: another one each time"}, set("seed"))}
      ${number("Longest answer", settings.n_predict, {min: 1, step: 1, about: "tokens"}, value => act.set("n_predict", value === "" ? DEFAULTS.n_predict : Number(value)))}
      ${area("Stop at", "stop", 2, "texts that end an answer, one a line")}
    </fieldset>
    <label class="choice"><input type="checkbox" role="switch" .checked=${live(settings.replay)} @change=${({target}) => act.set("replay", target.checked)}>
      <span>Replay<small>passages of the files that share words with the question are repeated before it</small></span></label>
    <label class="field">Colours ${select([["system", "as the system"], ["light", "light"], ["dark", "dark"]], settings.colours, set("colours"))}</label>
    ${field("API key", html`<input type="password" id=${idOf("API key")} aria-describedby=${idOf("API key", "about")} autocomplete="off"
      .value=${key.get()} @change=${event => act.key(event.target.value)}>`, "if the server wants one; for this tab")}
    ${done(act)}`, state, act);
}

// -- PCD ---------------------------------------------------------------------------------------------------------------

export function pcdDialog(state, act) {
  const {settings, props} = state;
  const pcd = props?.pcd;
  const chosen = choiceOf(settings, pcd);
  const choose = value => {
    if (value === "custom" && !Object.keys(settings.custom).length) act.set("custom", firstCustom(settings, pcd));
    act.set("setting", value);
  };
  return dialog("PCD", state.panel === "pcd", () => act.panel(null), () => html`
    <h2>PCD <small>of the next answers</small></h2>
    <p class="quiet">PCD evaluates each token a second time, with little of the text but what is near, and subtracts the result. So what is far
      away in a long text counts more.</p>
    <div role="radiogroup" aria-label="PCD">
      ${choices(pcd).map(({value, label, about}) => html`<label class="choice"><input type="radio" name="pcd" value=${value}
        .checked=${live(value === chosen)} @change=${() => choose(value)}><span>${label}<small>${about}</small></span></label>`)}
    </div>
    ${pcd?.presets && chosen === "custom" ? custom(settings, pcd, act) : nothing}
    ${done(act)}`, state, act);
}

function custom(settings, pcd, act) {
  const set = name => value => act.set("custom", {...settings.custom, [name]: value});
  return html`<fieldset id="custom"><legend class="unseen">Custom</legend>${Object.entries(customOf(settings, pcd)).map(([name, value]) => {
    const {label, about} = VALUES[name];
    const names = namesOf(name, pcd);
    const shown = label.toLowerCase() === name ? label : html`${label} <code class="quiet">(${name})</code>`;
    if (names) return field(label, select(names.map(one => [one, one]), value ?? "none", set(name), idOf(label)), about, shown);
    return number(label, value ?? 0, VALUES[name], given => set(name)(given === "" ? undefined : Number(given)), "", shown);
  })}</fieldset>`;
}

// -- a token ---------------------------------------------------------------------------------------------------------

export function tokenDialog(state, act) {
  const message = state.open && state.conversation.messages.get(state.open.id);
  const token = message?.tokens[state.open.index];
  return dialog("Token", Boolean(token), () => act.open(null), () => {
    const {index} = state.open;
    const alone = replaced(token);
    const step = (label, to) => html`<button ?disabled=${!message.tokens[to]} @click=${() => act.open(message, to)}>${label}</button>`;
    return html`
      <h2><code>${shown(token)}</code> <small>token ${index + 1} of ${message.tokens.length}</small></h2>
      <p>${token.chosen ? "You chose this token." : alone ? html`The model alone would most probably have said <code>${shown(alone)}</code>.`
        : token.strength !== null ? "PCD did not change the most probable token here."
        : token.options.every(option => option.local === null) ? "This step was decoded plainly."
        : "This step needed no contrast: one token alone is plausible."}
        ${token.strength === null ? nothing : `Strength (beta): ${token.strength.toFixed(2)}.`}</p>
      ${token.options.length ? table(message, index, act, state) : html`<p>Its candidates are not known: it was accepted from a draft.</p>`}
      <p class="quiet">Click another token to go on with the answer from it. The columns are three probabilities of each token. Model: of the
        model alone (L). Local: of the second evaluation, which sees little of the text but what is near (L*). PCD: after the contrast of
        the two; the answer's token was drawn from these.</p>
      <div class="tools">${step("Previous token", index - 1)} ${step("Next token", index + 1)}
        <button class="first" @click=${() => act.open(null)}>Close</button></div>`;
  }, state, act);
}

function table(message, index, act, state) {
  const token = message.tokens[index];
  const busy = state.runs.size > 0;
  return html`<table>
    <thead><tr><th scope="col">Token</th><th scope="col">Model</th><th scope="col">Local</th><th scope="col">PCD</th></tr></thead>
    <tbody>${candidates(token).map(option => html`<tr class=${option.id === token.id ? "own" : ""}>
      <th scope="row">${option.id === token.id || option.bytes ? html`<code title=${shown(option)}>${shown(option)}</code>`
        : html`<button ?disabled=${busy} aria-label=${`Go on with ${shown(option)}`} title=${shown(option)} @click=${() => act.goOn(message, index, option)}><code>${shown(option)}</code></button>`}</th>
      <td>${bar(option.model, "model")}</td><td>${bar(option.local, "local")}</td>
      <td>${option.pcd === null ? html`<span class="quiet">taken out</span>` : bar(option.pcd, "pcd")}</td></tr>`)}</tbody>
  </table>`;
}

function bar(p, kind) {
  if (p === null) return html`<span class="quiet">–</span>`;
  const percent = 100 * p;
  return html`<svg class="bar" aria-hidden="true">${svg`<rect class=${kind} width=${`${percent}%`} height="100%"></rect>`}</svg>
    ${percent >= 0.1 ? percent.toFixed(1) : "< 0.1"} %`;
}

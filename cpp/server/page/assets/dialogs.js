// The dialogs: settings, conversations, and a token with its candidates. They stay in the page and are shown by main.js, so that the
// browser keeps the focus in them and gives it back.

import {html, nothing, svg} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";
import {key} from "./api.js";
import {error, select} from "./parts.js";
import {customOf, DEFAULTS, NUMBERS} from "./settings.js";
import {candidates, replaced, shown} from "./tokens.js";

function dialog(label, open, close, content, state, act) {
  return html`<dialog aria-label=${label} data-open=${String(open)} @close=${() => open && close()}
    @cancel=${event => { if (event.target === event.currentTarget) { event.preventDefault(); close() } }}>
    ${open ? html`${error(state, act)}${content()}` : nothing}</dialog>`;
}

const idOf = (...words) => words.join("-").replace(/\W+/g, "-");

// -- settings ----------------------------------------------------------------------------------------------------------

export function settingsDialog(state, act) {
  const {settings} = state;
  const field = (label, input, about = "") => html`<div class="field"><label for=${idOf(label)}>${label}</label>${input}
    ${about && html`<small id=${idOf(label, "about")}>${about}</small>`}</div>`;
  const number = (label, value, {min, max, step}, changed, about = "") => field(label, html`<input type="number" id=${idOf(label)}
    aria-describedby=${about ? idOf(label, "about") : nothing} min=${min} max=${max ?? nothing} step=${step} .value=${String(value)}
    @change=${({target}) => target.reportValidity() && changed(target.value)}>`, about);
  const given = name => value => value === "" ? act.set(name, DEFAULTS[name]) : act.set(name, Number(value));
  const set = name => value => act.set(name, value);
  const pcd = state.props?.pcd;
  return dialog("Settings", state.panel === "settings", () => act.panel(null), () => html`
    <h2>Settings</h2>
    ${number("Temperature", settings.temperature, {min: 0, max: 5, step: "any"}, given("temperature"), "0: always the most probable token")}
    ${number("Top p", settings.top_p, {min: 0, max: 1, step: "any"}, given("top_p"))}
    ${number("Longest answer", settings.n_predict, {min: 1, step: 1}, given("n_predict"), "tokens")}
    ${number("Seed", settings.seed, {min: 0, max: 4294967295, step: 1}, set("seed"), "empty: another one each time")}
    ${field("System message", html`<textarea id=${idOf("System message")} rows="3" .value=${live(settings.system)}
      @change=${event => act.set("system", event.target.value)}></textarea>`)}
    <label class="field">Colours ${select([["system", "as the system"], ["light", "light"], ["dark", "dark"]], settings.colours, set("colours"))}</label>
    ${field("API key", html`<input type="password" id=${idOf("API key")} aria-describedby=${idOf("API key", "about")} autocomplete="off"
      .value=${live(key.get())} @change=${event => act.key(event.target.value)}>`, "where the server wants one; for this tab")}
    ${pcd?.presets && settings.setting === "custom" ? html`<fieldset><legend>PCD: custom</legend>
      ${Object.entries(customOf(settings, pcd)).map(([name, value]) => number(NUMBERS[name].label, value ?? 0, NUMBERS[name],
        found => act.set("custom", {...settings.custom, [name]: found === "" ? pcd.setting[name] : Number(found)}), NUMBERS[name].about))}</fieldset>` : nothing}
    <button class="first" @click=${event => isValid(event.target.closest("dialog")) && act.panel(null)}>Done</button>`, state, act);
}

/** What cannot be taken is told, and stays to be mended. */
const isValid = dialog => [...dialog.querySelectorAll("input")].every(input => input.reportValidity());

// -- conversations -------------------------------------------------------------------------------------------------------

export function conversationsDialog(state, act) {
  return dialog("Conversations", state.panel === "conversations", () => act.panel(null), () => html`
    <nav aria-label="Conversations">
      <h2>Conversations</h2>
      <button class="first" @click=${act.fresh}>New conversation</button>
      <ul>${state.list.map(({id, title}) => html`<li>
        <button class="title" aria-current=${id === state.conversation.id} @click=${() => act.load(id)}>${title}</button>
        <button aria-label=${`Delete ${title}`} @click=${() => act.remove(id)}>×</button></li>`)}</ul>
      <p class="quiet">${state.imported ? `Imported: ${state.imported}.` : ""} They are kept in this browser.</p>
      <div class="tools">
        <button @click=${act.exportAll}>Export</button>
        <button @click=${event => event.target.nextElementSibling.click()}>Import</button>
        <input type="file" accept=".json,application/json" hidden @change=${({target}) => { target.files[0] && act.importAll(target.files[0]); target.value = "" }}>
        <button @click=${() => act.panel(null)}>Close</button>
      </div>
    </nav>`, state, act);
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
        : token.strength === null ? plainly(token) : "PCD did not change the most probable token here."}
        ${token.strength === null ? nothing : `Strength (beta): ${token.strength.toFixed(2)}.`}</p>
      ${token.options.length ? table(message, index, act, state) : html`<p>Its candidates are not known: it was accepted from a draft.</p>`}
      <p class="quiet">Click another token to go on with the answer from it. The columns are three probabilities of each token. Model: of the
        model alone (L). Local: of the second evaluation, which sees little of the text but what is near (L*). PCD: after the contrast of
        the two; the answer’s token was drawn from these.</p>
      <div class="tools">${step("Previous token", index - 1)} ${step("Next token", index + 1)}
        <button class="first" @click=${() => act.open(null)}>Close</button></div>`;
  }, state, act);
}

function plainly(token) {
  if (token.options.every(option => option.local === null)) return "This step was decoded plainly.";
  return "This step needed no contrast: one token alone is plausible.";
}

function table(message, index, act, state) {
  const token = message.tokens[index];
  const busy = state.runs.size > 0;
  return html`<table>
    <thead><tr><th scope="col">Token</th><th scope="col">Model</th><th scope="col">Local</th><th scope="col">PCD</th></tr></thead>
    <tbody>${candidates(token).map(option => html`<tr class=${option.id === token.id ? "own" : ""}>
      <th scope="row">${option.id === token.id || option.bytes ? html`<code>${shown(option)}</code>`
        : html`<button ?disabled=${busy} aria-label=${`Go on with ${shown(option)}`} @click=${() => act.goOn(message, index, option)}><code>${shown(option)}</code></button>`}</th>
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

// Elements that several views have.

import {html, nothing} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";

/** options: [value, label]. */
export function select(options, value, changed, id = "") {
  return html`<select id=${id || nothing} .value=${live(value)} @change=${event => changed(event.target.value)}>
    ${options.map(([name, label]) => html`<option value=${name} ?selected=${name === value}>${label}</option>`)}
  </select>`;
}

/** What went wrong; in the dialog, where one is open, since it would hide what is behind it. */
export function error(state, act) {
  return state.error ? html`<p class="error" role="alert">${state.error} <button @click=${act.dismiss}>Close</button></p>` : nothing;
}

export function dialog(label, open, close, content, state, act) {
  return html`<dialog aria-label=${label} data-open=${String(open)} closedby="any" @close=${() => open && close()}
    @cancel=${event => { if (event.target === event.currentTarget) { event.preventDefault(); close() } }}>
    ${open ? html`${error(state, act)}${content()}` : nothing}</dialog>`;
}

// Elements that several views have.

import {html, nothing} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";

/** options: [value, label]. */
export function select(options, value, changed) {
  return html`<select .value=${live(value)} @change=${event => changed(event.target.value)}>
    ${options.map(([name, label]) => html`<option value=${name} ?selected=${name === value}>${label}</option>`)}
  </select>`;
}

/** What went wrong; in the dialog, where one is open, since it would hide what is behind it. */
export function error(state, act) {
  return state.error ? html`<p class="error" role="alert">${state.error} <button @click=${act.dismiss}>Close</button></p>` : nothing;
}

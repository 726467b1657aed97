// Elements that several views have.

import {html} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";

/** options: [value, label]. */
export function select(options, value, changed) {
  return html`<select .value=${live(value)} @change=${event => changed(event.target.value)}>
    ${options.map(([name, label]) => html`<option value=${name} ?selected=${name === value}>${label}</option>`)}
  </select>`;
}

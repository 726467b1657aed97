// Elements that several views have.

import {html, nothing, svg} from "./vendor/lit-html/lit-html.js";
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

/** kind: a class of its looks. */
export function dialog(label, open, close, content, state, act, kind = "") {
  return html`<dialog class=${kind || nothing} aria-label=${label} data-open=${String(open)} closedby="any"
    @close=${({target}) => open && !target.open && close()}
    @cancel=${event => { if (event.target === event.currentTarget) { event.preventDefault(); close() } }}>
    ${open ? html`${error(state, act)}${content()}` : nothing}</dialog>`;
}

// Lines on a field of 16 by 16.
const ICONS = {
  plus: "M8 3v10M3 8h10", cross: "M4 4l8 8M12 4l-8 8", pen: "M3 13l.7-3L11 2.7 13.3 5 6 12.3zM9.5 4.2l2.3 2.3", menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  bin: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5", clip: "M13 7.5L8 12.5a3 3 0 0 1-4.3-4.3L9 3a2 2 0 0 1 2.9 2.9L6.7 11a1 1 0 0 1-1.4-1.4L10 5",
  gear: "M2 5h6.2M12.2 5H14M2 11h1.8M7.8 11H14M10.2 3a2 2 0 1 0 0 4 2 2 0 0 0 0-4zM5.8 9a2 2 0 1 0 0 4 2 2 0 0 0 0-4z",
  down: "M4 6l4 4 4-4", file: "M4 2h5l3 3v9H4zM9 2v3h3",
};

export const icon = name => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">${svg`<path d=${ICONS[name]}></path>`}</svg>`;

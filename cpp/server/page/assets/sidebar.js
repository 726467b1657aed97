// The list of conversations: beside the talk where there is room, else in a drawer.

import {html, nothing} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";
import {repeat} from "./vendor/lit-html/directives/repeat.js";
import {dialog, icon} from "./parts.js";

export const sidebar = (state, act) => state.isWide
  ? html`<aside>${list(state, act)}</aside>`
  : dialog("Conversations", state.panel === "conversations", () => act.panel(null), () => list(state, act), state, act, "drawer");

function list(state, act) {
  const {search, found, deleted} = state;
  const shown = found ? state.list.filter(({id}) => found.has(id)) : state.list;
  return html`<nav aria-label="Conversations">
    <div class="tools">
      <button class="wide" @click=${act.fresh}>${icon("plus")} New conversation</button>
      ${state.isWide ? nothing : html`<button class="bare" aria-label="Close" @click=${() => act.panel(null)}>${icon("cross")}</button>`}
    </div>
    <input type="search" aria-label="Search conversations" placeholder="Search" .value=${live(search)} @input=${event => act.search(event.target.value)}>
    <ul>${repeat(shown, ({id}) => id, head => state.renaming === head.id ? renamed(head, act) : entry(head, state, act))}</ul>
    ${shown.length ? nothing : html`<p class="quiet">${found ? "Nothing was found." : "No conversations yet."}</p>`}
    ${deleted ? html`<p class="deleted quiet" role="status"><span>Deleted: ${deleted.title}</span> <button @click=${act.restore}>Undo</button></p>` : nothing}
    <div class="tools foot">
      <button class="bare" @click=${act.exportAll}>Export</button>
      <button class="bare" @click=${event => event.target.nextElementSibling.click()}>Import</button>
      <input type="file" accept=".json,application/json" hidden @change=${({target}) => { target.files[0] && act.importAll(target.files[0]); target.value = "" }}>
    </div>
  </nav>`;
}

const entry = ({id, title}, state, act) => html`<li class=${id === state.conversation.id ? "current" : ""}>
  <button class="title" title=${title} aria-current=${id === state.conversation.id} @click=${() => act.load(id)}>${title}</button>
  <button class="bare" id=${"rename-" + id} aria-label=${`Rename ${title}`} @click=${() => act.rename(id)}>${icon("pen")}</button>
  <button class="bare" aria-label=${`Delete ${title}`} @click=${() => act.remove(id)}>${icon("bin")}</button></li>`;

const renamed = ({id, title}, act) => html`<li><input id="title" aria-label="Title" .value=${title} maxlength="120"
  @blur=${event => event.target.isConnected && act.retitle(id, event.target.value)}
  @keydown=${event => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    act.retitle(id, event.key === "Enter" ? event.target.value : title);
  }}></li>`;

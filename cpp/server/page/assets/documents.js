// The text of a document of the talk, and where a passage stands in it.

import {html, nothing} from "./vendor/lit-html/lit-html.js";
import {dialog} from "./parts.js";

const PIECES = /[^]{1,4000}(?:\n|$)|[^]{1,4000}/gu; // of whole lines, where they are not longer

/** Where the n-th character of a text is, as Python counts them: here some are two. */
function offsetOf(text, n) {
  let at = 0;
  for (; n > 0 && at < text.length; --n) at += text.codePointAt(at) > 0xffff ? 2 : 1;
  return at;
}

/** What is shown of a file: its name, a place in it, and its pieces, each as what is before, in, and behind the passage. */
export function opened({name, text}, place = "", from = 0, to = 0) {
  let at = 0;
  const pieces = (text.match(PIECES) ?? []).map(piece => {
    const [start, stop] = [from, to].map(place => Math.max(0, Math.min(piece.length, place - at)));
    at += piece.length;
    return [piece.slice(0, start), piece.slice(start, stop), piece.slice(stop)];
  });
  return {name, place, pieces};
}

/** The same at a passage that the server has told. path: the talk before the answer. */
export function openedAt(path, {document, place, text, begin, end}) {
  for (const file of path.flatMap(({files = []}) => files)) {
    if (file.name !== document) continue;
    const from = offsetOf(file.text, begin);
    const to = from + offsetOf(file.text.slice(from), end - begin);
    if (from < to && text.includes(file.text.slice(from, to))) return opened(file, place, from, to); // else it is another one of that name
  }
  throw new Error(`${document} is not in this conversation any more.`);
}

/** The browser lays out the pieces that are seen alone: so a book is there at once. */
export const documentDialog = (state, act) => dialog("Document", Boolean(state.document), () => act.document(null), () => html`
  <h2 tabindex="-1" autofocus>${state.document.name} <small>${state.document.place}</small></h2>
  <div class="document">${state.document.pieces.map(([before, marked, behind]) =>
    html`<div>${before}${marked ? html`<mark>${marked}</mark>` : nothing}${behind}</div>`)}</div>
  <div class="tools"><button class="first" @click=${() => act.document(null)}>Close</button></div>`, state, act, "reader");

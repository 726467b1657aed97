// What a model wrote, as elements. It is not trusted: its HTML is shown as text, what the Markdown makes is sanitised, and
// nothing in it loads anything.

import {marked} from "./vendor/marked/marked.esm.js";
import DOMPurify from "./vendor/dompurify/purify.es.mjs";

const LONGEST = 200_000; // characters; a longer text stays text
const OPEN = "\uE000", MIDDLE = "\uE001", CLOSE = "\uE002"; // private use: they stand around marked words while Markdown is read
const MARKS = /[\uE000-\uE002]/g;
const MARKED = /\uE000(\d+)\uE001([^\uE000-\uE002]*)\uE002/g;

const unmarked = text => text.replace(/\uE000\d+\uE001|[\uE000-\uE002]/g, "");

const escaped = text => text.replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

marked.use({
  gfm: true,
  walkTokens: token => {
    if (token.href) token.href = unmarked(token.href);
    token.escaped = false; // behind <script> and the like it takes text for HTML that is shown as it is
  },
  renderer: {
    html: ({text}) => escaped(text),
    image: ({href, text}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.localName !== "a") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

const RULES = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

/**
 * An element with the text. pieces: {text, mark}, in order; mark is a number for a word that is marked, else null. Each marked word
 * becomes an element of what button(mark, word) makes.
 */
export function markdown(pieces, button) {
  const plain = pieces.map(piece => piece.text).join("");
  const thought = /^\s*<think>([^]*?)(?:<\/think>|$)/.exec(plain); // how models that reason first set it apart
  if (thought) {
    const folded = document.createElement("details");
    folded.append(Object.assign(document.createElement("summary"), {textContent: "Reasoning"}), thought[1].trim());
    const rest = markdown(after(pieces, thought[0].length), button);
    rest.prepend(folded);
    return rest;
  }
  const element = document.createElement("div");
  element.className = "markdown";
  try {
    if (plain.length > LONGEST) throw new RangeError("too long");
    element.append(DOMPurify.sanitize(marked.parse(withMarks(pieces)), RULES));
  } catch { // nested without end: the reader of Markdown gives up, and the text is shown as it is
    element.textContent = plain;
    element.classList.add("plain");
    return element;
  }
  mark(element, button);
  return element;
}

/**
 * The Markdown with its marks. It has to mean the same with and without them, so only words are marked, and those that are part of an
 * address, of "&amp;" or of the name of a link are not, nor those beside "_", which between letters is no emphasis.
 */
function withMarks(pieces) {
  const clean = pieces.map(piece => piece.text.replace(MARKS, ""));
  const addresses = [...clean.join("").matchAll(/\S+/g)].filter(run => /:\/\/|@|www\./i.test(run[0]))
    .map(({index, 0: found}) => [index, index + found.length]);
  let start = 0;
  return pieces.map(({mark}, i) => {
    const text = clean[i];
    const word = text.trimStart();
    const at = start + text.length - word.length;
    start += text.length;
    while (addresses.length && addresses[0][1] <= at) addresses.shift();
    if (mark === null || !isWord(word) || addresses[0]?.[0] <= at) return text;
    if ((text === word && /[&[<_]$/.test(clean[i - 1])) || /^[;\]:>_]/.test(clean[i + 1])) return text;
    return `${text.slice(0, -word.length)}${OPEN}${mark}${MIDDLE}${word}${CLOSE}`;
  }).join("");
}

const isWord = text => text.length <= 64 && /^[\p{L}\p{N}'’-]+$/u.test(text) && /\p{L}/u.test(text);

/** The pieces without their first n characters. */
function after(pieces, n) {
  return pieces.flatMap(piece => {
    const cut = Math.min(n, piece.text.length);
    n -= cut;
    return cut < piece.text.length ? [{text: piece.text.slice(cut), mark: cut ? null : piece.mark}] : [];
  });
}

function mark(element, button) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) if (/[\uE000-\uE002]/.test(walker.currentNode.data)) found.push(walker.currentNode);
  for (const node of found) {
    const inLink = node.parentElement.closest("a");
    const parts = [];
    let end = 0;
    for (const match of node.data.matchAll(MARKED)) {
      parts.push(node.data.slice(end, match.index).replace(MARKS, ""), inLink ? match[2] : button(Number(match[1]), match[2]));
      end = match.index + match[0].length;
    }
    parts.push(unmarked(node.data.slice(end)));
    node.replaceWith(...parts);
  }
  // A table may be wider than the page, and a place that scrolls has to be reachable by keyboard.
  for (const wide of element.querySelectorAll("pre, table")) {
    const box = document.createElement("div");
    box.className = "wide";
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", wide.localName === "pre" ? "Code" : "Table");
    wide.replaceWith(box);
    box.append(wide);
  }
}

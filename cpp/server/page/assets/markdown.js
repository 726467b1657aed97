// What a model wrote, as elements. It is not trusted: its HTML is shown as text, what the Markdown makes is sanitised, and
// nothing in it loads anything.

import {marked} from "./vendor/marked/marked.esm.js";
import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import {highlighted, languageOf} from "./code.js";
import {ATTRIBUTES, extensions, TAGS} from "./formulas.js";
import {place} from "./places.js";

const LONGEST = 200_000; // characters; a longer text stays text

const escaped = text => text.replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

/** As Markdown takes it: "&amp;" is one character. */
const escapedOnce = text => text.replace(/[<>"']|&(?!(?:#\d{1,7}|#x[\da-f]{1,6}|\w+);)/gi, escaped);

/** The text of a part of the Markdown, with its marks. */
function withMarks(token, escape) {
  let html = "", end = 0;
  for (const {from, to, mark} of token.marks ?? []) {
    html += `${escape(token.text.slice(end, from))}<mark data-mark="${mark}">${escape(token.text.slice(from, to))}</mark>`;
    end = to;
  }
  return html + escape(token.text.slice(end));
}

let blocks = []; // of code, in the block that is being made

marked.use({
  gfm: true,
  extensions: extensions((token, mathml) => {
    const html = mathml ?? escaped(token.raw.trim());
    if (!token.marks?.length) return html;
    return `<mark data-mark="${token.marks[0].mark}" data-name="${mathml ? escaped(token.text) : ""}">${html}</mark>`;
  }),
  renderer: {
    text(token) {
      return token.tokens ? this.parser.parseInline(token.tokens) : withMarks(token, escapedOnce);
    },
    checkbox: ({checked}) => `<span class="task">${checked ? "☑" : "☐"} </span>`,
    codespan: token => `<code>${withMarks(token, escaped)}</code>`,
    html: token => withMarks(token, escaped),
    image: ({href, text}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code(token) {
      blocks.push(token);
      return `<pre><code>${highlighted(token) ?? escaped(token.text)}\n</code></pre>`;
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.localName !== "a") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

DOMPurify.addHook("uponSanitizeAttribute", (node, attribute) => {
  if (attribute.attrName === "class") attribute.keepAttr = /^(task|hljs-[a-z_-]+( [a-z]+_+)*)$/.test(attribute.attrValue);
  if (attribute.attrName === "align") attribute.keepAttr = ["td", "th"].includes(node.localName);
});

const RULES = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "mark", "ol", "p", "pre",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", ...TAGS],
  ALLOWED_ATTR: ["align", "class", "data-mark", "data-name", "href", "start", ...ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "data-mark", "data-name", "start", ...ATTRIBUTES], // these are no addresses
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const written = new WeakMap(); // an element that was made here -> its blocks: [{key, nodes}]

/**
 * An element with the text. pieces: {text, mark}, in order; mark is a number for one that is marked, else null. The word around each
 * marked piece becomes an element of what button(mark, word) makes. copy(text) is what the button of a block of code does.
 *
 * element: what was made of the first of these pieces. Its blocks that stay as they are, stay: while an answer is written, the last one
 * alone is made anew, and what a person selects, scrolls or is about to click in the others is not taken away.
 */
export function markdown(pieces, button, copy, element = document.createElement("div")) {
  let text = textOf(pieces);
  const thought = /^\s*<think>([^]*?)(?:<\/think>|$)/.exec(text); // how models that reason first set it apart
  if (thought) {
    pieces = after(pieces, thought[0].length);
    text = textOf(pieces);
  }
  element.className = "markdown";
  try {
    if (text.length > LONGEST) throw new RangeError("too long");
    fill(element, text.replaceAll("\r\n", " \n").replaceAll("\r", "\n"), rangesOf(pieces), button, copy); // as long as it was
  } catch { // nested without end: the reader of Markdown gives up, and the text is shown as it is
    element.replaceChildren(text);
    element.classList.add("plain");
    written.delete(element);
  }
  if (thought) fold(element, thought[1].trim());
  return element;
}

const textOf = pieces => pieces.map(piece => piece.text).join("");

/** What the model thought before its answer. */
function fold(element, text) {
  let folded = element.querySelector(":scope > details");
  if (!folded) {
    folded = document.createElement("details");
    folded.append(Object.assign(document.createElement("summary"), {textContent: "Reasoning"}), "");
    element.prepend(folded);
  }
  if (folded.lastChild.data !== text) folded.lastChild.data = text;
}

function fill(element, text, ranges, button, copy) {
  const tokens = marked.lexer(text);
  const links = JSON.stringify(tokens.links); // addresses that are given behind a block change it too
  const before = written.get(element) ?? [];
  const now = [];
  let start = 0, kept = 0;
  for (const token of tokens) {
    const end = start + token.raw.length;
    const own = ranges.filter(range => range.from < end && range.to > start);
    const key = JSON.stringify([token.raw, links, own.map(range => [range.from - start, range.to - start, range.mark])]);
    if (kept === now.length && before[kept]?.key === key) now.push(before[kept++]);
    else {
      place([token], text, own, start);
      now.push({key, nodes: elementsOf(token, button, copy)});
    }
    start = end;
  }
  if (!written.has(element)) element.replaceChildren();
  for (const {nodes} of before.slice(kept)) for (const node of nodes) node.remove();
  element.append(...now.slice(kept).flatMap(({nodes}) => nodes));
  written.set(element, now);
}

/** One block of the text. */
function elementsOf(token, button, copy) {
  blocks = [];
  const made = DOMPurify.sanitize(marked.parser([token]), RULES);
  const codes = [...made.querySelectorAll("pre > code")];
  for (const [i, code] of codes.entries()) markCode(code, blocks[i].marks ?? []);
  for (const mark of made.querySelectorAll("mark")) {
    const marked = button(Number(mark.dataset.mark), mark.textContent);
    marked.replaceChildren(...mark.childNodes);
    if (mark.dataset.name) marked.ariaLabel = mark.dataset.name;
    mark.replaceWith(marked);
  }
  for (const [i, code] of codes.entries()) {
    const {text} = blocks[i];
    const language = languageOf(blocks[i]);
    const box = scroll(code.parentElement, language ? `Code: ${language}` : "Code");
    const head = Object.assign(document.createElement("div"), {className: "code"});
    const press = Object.assign(document.createElement("button"), {textContent: "Copy code", ariaLabel: "Copy code"});
    press.onclick = () => copied(press, copy(text));
    head.append(Object.assign(document.createElement("span"), {textContent: language}), press);
    box.before(head);
  }
  for (const table of made.querySelectorAll("table")) scroll(table, "Table");
  for (const math of made.querySelectorAll("math[display=block]")) scroll(math.closest("button") ?? math, "Formula", "span");
  return [...made.childNodes];
}

/** Says so on the button, for those who see; its name stays. */
async function copied(press, copying) {
  if (!await copying) return; // it is told why
  press.textContent = "Copied";
  setTimeout(() => { press.textContent = "Copy code" }, 1500);
}

/** The pieces without their first n characters. */
function after(pieces, n) {
  return pieces.flatMap(piece => {
    const cut = Math.min(n, piece.text.length);
    n -= cut;
    return cut < piece.text.length ? [{text: piece.text.slice(cut), mark: cut ? null : piece.mark}] : [];
  });
}

/** Where the marked pieces stand in the whole text. */
function rangesOf(pieces) {
  const ranges = [];
  let from = 0;
  for (const {text, mark} of pieces) {
    if (mark !== null && /\S/.test(text)) ranges.push({from, to: from + text.length, mark});
    from += text.length;
  }
  return ranges;
}

/** Marks in code, which may be of several elements. */
function markCode(code, marks) {
  for (const {from, to, mark} of marks) {
    const range = document.createRange();
    range.setStart(...pointOf(code, from, true));
    range.setEnd(...pointOf(code, to, false));
    const made = document.createElement("mark");
    made.dataset.mark = mark;
    made.append(range.extractContents());
    range.insertNode(made);
  }
}

/** The text node and the place in it where the n-th character is; where two nodes meet, in the next one or in the one before. */
function pointOf(element, n, next) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const {length} = walker.currentNode;
    if (next ? n < length : n <= length) return [walker.currentNode, n];
    n -= length;
  }
  throw new RangeError("behind the end of the text");
}

/** What may be wider than the page; and a place that scrolls has to be reachable by keyboard. kind: a paragraph takes "span" only. */
function scroll(wide, name, kind = "div") {
  const box = document.createElement(kind);
  box.className = "wide";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", name);
  wide.replaceWith(box);
  box.append(wide);
  return box;
}

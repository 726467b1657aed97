// What a model wrote, as elements. It is not trusted: its HTML is shown as text, what the Markdown makes is sanitised, and
// nothing in it loads anything.

import {marked} from "./vendor/marked/marked.esm.js";
import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import {code, escaped} from "./code.js";
import {ATTRIBUTES, extensions, TAGS} from "./formulas.js";

const LONGEST = 200_000; // characters; a longer text stays text

marked.use({
  gfm: true,
  extensions,
  renderer: {
    checkbox: ({checked}) => `<span class="task">${checked ? "☑" : "☐"} </span>`,
    html: ({text}) => escaped(text),
    image: ({href, text}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code,
  },
  tokenizer: {
    inlineText() { // HTML is text here, so what follows a <script> is no script, which marked would not escape
      this.lexer.state.inRawBlock = false;
      return false; // and marked goes on
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
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", ...TAGS],
  ALLOWED_ATTR: ["align", "class", "data-language", "href", "start", ...ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "data-language", "start", ...ATTRIBUTES], // these are no addresses
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const written = new WeakMap(); // an element that was made here -> its blocks: [{key, nodes}]

/**
 * An element with the text. copy(text) is what the button of a block of code does.
 *
 * element: what was made of the beginning of this text. Its blocks that stay as they are, stay: while an answer is written, the last one
 * alone is made anew, and what a person selects, scrolls or is about to click in the others is not taken away.
 */
export function markdown(text, copy, element = document.createElement("div")) {
  const [thought, reasoning] = /^\s*<think>([^]*?)(?:<\/think>|$)/.exec(text) ?? [""]; // how models that reason first set it apart
  const said = text.slice(thought.length);
  element.className = "markdown";
  try {
    if (said.length > LONGEST) throw new RangeError("too long");
    fill(element, said, copy);
  } catch { // nested without end: the reader of Markdown gives up, and the text is shown as it is
    element.replaceChildren(said);
    element.classList.add("plain");
    written.delete(element);
  }
  if (thought) fold(element, reasoning.trim());
  return element;
}

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

function fill(element, text, copy) {
  const tokens = marked.lexer(text);
  const links = JSON.stringify(tokens.links); // addresses that are given behind a block change it too
  const keys = tokens.map(({raw}) => raw + links);
  const before = written.get(element) ?? [];
  const kept = before.findIndex(({key}, i) => key !== keys[i]);
  const now = kept < 0 ? [...before] : before.slice(0, kept);
  if (!written.has(element)) element.replaceChildren();
  for (const {nodes} of before.slice(now.length)) for (const node of nodes) node.remove();
  for (const [i, token] of tokens.entries()) {
    if (i < now.length) continue;
    now.push({key: keys[i], nodes: elementsOf(token, copy)});
    element.append(...now[i].nodes);
  }
  written.set(element, now);
}

/** One block of the text. */
function elementsOf(token, copy) {
  const made = DOMPurify.sanitize(marked.parser([token]), RULES);
  for (const code of made.querySelectorAll("pre > code")) {
    const {language} = code.dataset;
    const text = code.textContent.slice(0, -1);
    const box = scroll(code.parentElement, language ? `Code: ${language}` : "Code");
    const head = Object.assign(document.createElement("div"), {className: "code"});
    const press = Object.assign(document.createElement("button"), {textContent: "Copy code", ariaLabel: "Copy code"});
    press.onclick = () => copy(text, press);
    head.append(Object.assign(document.createElement("span"), {textContent: language}), press);
    box.before(head);
  }
  for (const table of made.querySelectorAll("table")) scroll(table, "Table");
  for (const math of made.querySelectorAll("math[display=block]")) scroll(math, "Formula", "span");
  return [...made.childNodes];
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

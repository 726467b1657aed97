// Formulas in Markdown: where they begin and end, and their MathML, which is sanitised later. Needs no fonts of its own.

import "./vendor/katex/katex.min.js"; // no module: it sets self.katex
import {escaped} from "./code.js";

const LONGEST = 4000; // characters

// The first that fits; "$" last, since it may be a price.
const KINDS = [
  {open: "$$", close: "$$", display: true}, {open: "\\[", close: "\\]", display: true},
  {open: "\\(", close: "\\)", display: false}, {open: "$", close: "$", display: false},
];

/** The formula that a text begins with: {raw, text, display}; before: the character in front of it. */
function formulaAt(text, before = "") {
  for (const {open, close, display} of KINDS) {
    if (!text.startsWith(open)) continue;
    const end = closing(text, open.length, close);
    if (end < 0) continue;
    const raw = text.slice(0, end + close.length);
    const tex = text.slice(open.length, end);
    if (!tex.trim() || /\n[ \t]*\n/.test(tex)) continue;
    if (open === "$" && !isFormula(tex, before, text[raw.length])) continue;
    return {raw, text: tex, display};
  }
  return null;
}

function closing(text, from, close) {
  const end = Math.min(text.length, from + LONGEST);
  for (let at = from; at < end; ++at) {
    if (text.startsWith(close, at)) return at;
    if (text[at] === "\\") ++at; // what is behind it does not close
  }
  return -1;
}

/** Between single dollars, and not between two prices or names of variables. */
function isFormula(tex, before, behind = "") {
  if (/^\s|\s$|[\n`$]/.test(tex) || /[\p{L}\p{N}$\\]/u.test(before) || /[\p{L}\p{N}$]/u.test(behind)) return false;
  const words = tex.replace(/\\[a-z]+\*?(\{[^{}]*\})?/gi, " . ");
  return !(/^[\d.,]/.test(tex) ? /(^|\s)\p{L}{2,}(?=[\s.,;]|$)/u : /(^|\s)\p{L}{3,}(?=[\s.,;]|$)/u).test(words);
}

/** Its MathML; the text itself, if it is not TeX that KaTeX knows. */
function shown({raw, text, display}) {
  const options = {displayMode: display, output: "mathml", strict: "ignore", trust: false, errorColor: "currentColor", maxSize: 20, maxExpand: 500};
  try {
    return self.katex.renderToString(text, options).replace(/<annotation[^]*<\/annotation>|<\/?span[^>]*>/g, "");
  } catch (error) {
    if (error instanceof self.katex.ParseError || error instanceof RangeError) return escaped(raw.trim()); // RangeError: nested without end
    throw error;
  }
}

/** For marked. */
export const extensions = [
  {
    name: "formula",
    level: "block",
    start: text => text.search(/\n {0,3}(?:\$\$|\\\[)/) + 1 || undefined,
    tokenizer(text) {
      const blanks = /^ {0,3}/.exec(text)[0];
      const found = formulaAt(text.slice(blanks.length));
      const rest = found?.display && /^[ \t]*(?:\n+|$)/.exec(text.slice(blanks.length + found.raw.length));
      return rest ? {type: "formula", ...found, raw: blanks + found.raw + rest[0]} : undefined;
    },
    renderer: token => `<p>${shown(token)}</p>\n`,
  },
  {
    name: "inlineFormula",
    level: "inline",
    start: text => text.search(/\$|\\[[(]/),
    tokenizer(text, tokens) {
      const found = formulaAt(text, tokens.at(-1)?.raw.at(-1));
      return found ? {type: "inlineFormula", ...found} : undefined;
    },
    renderer: shown,
  },
];

// What KaTeX writes. Nothing of it is an address or runs.
export const TAGS = ["math", "menclose", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "mspace", "msqrt", "mstyle",
  "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "semantics"];
export const ATTRIBUTES = ["accent", "accentunder", "columnalign", "columnlines", "columnspacing", "depth", "display", "displaystyle", "fence",
  "height", "largeop", "linethickness", "lspace", "mathbackground", "mathcolor", "mathsize", "mathvariant", "maxsize", "minsize", "notation",
  "rowlines", "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "voffset", "width"];

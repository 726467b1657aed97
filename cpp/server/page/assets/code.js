// Blocks of code with their colours, as HTML that is sanitised later.

import hljs from "./vendor/highlight.js/highlight.min.js";

const LONGEST = 50_000; // characters; longer code has no colours
const MOST = 200; // blocks that are kept
const known = new Map(); // an answer that is being written is read again and again

const nameIn = ({lang}) => /^[^\s{,]*/.exec(lang ?? "")[0].slice(0, 30);

/** The name of a block's language for people; "" if the block names none. token: of marked. */
export function languageOf(token) {
  const name = nameIn(token);
  return hljs.getLanguage(name)?.name ?? name;
}

/** null where it has no colours: its language is not known, or it is not complete yet. */
export function highlighted(token) {
  const language = nameIn(token);
  if (!hljs.getLanguage(language) || token.text.length > LONGEST || !/\n[ \t>]*(`{3,}|~{3,})\s*$/.test(token.raw)) return null;
  const key = `${language}\n${token.text}`;
  if (!known.has(key)) {
    if (known.size >= MOST) known.clear();
    known.set(key, hljs.highlight(token.text, {language, ignoreIllegals: true}).value);
  }
  return known.get(key);
}

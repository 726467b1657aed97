// Blocks of code with their colours, as HTML that is sanitised later.

import hljs from "./vendor/highlight.js/highlight.min.js";

const LONGEST = 50_000; // characters; longer code has no colours

export const escaped = text => text.replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

/** token: of marked. While it is being written it has no colours. */
export function code(token) {
  const name = /^[^\s{,]*/.exec(token.lang ?? "")[0].slice(0, 30);
  const language = hljs.getLanguage(name);
  const isDone = /\n[ \t>]*(`{3,}|~{3,})\s*$/.test(token.raw);
  const html = language && isDone && token.text.length <= LONGEST
    ? hljs.highlight(token.text, {language: name, ignoreIllegals: true}).value : escaped(token.text);
  return `<pre><code data-language="${escaped(language?.name ?? name)}">${html}\n</code></pre>`;
}

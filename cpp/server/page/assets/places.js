// Where the parts that Markdown is made of stand in its text, to know which words to mark. The Markdown is read without the marks, so
// that it means the same with and without them; a part whose place is not found has none.

const STOPS = /[\s()[\]{}<>"“”„«»—`|\\*~\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{scx=Thai}\p{scx=Laoo}\p{scx=Khmr}\p{scx=Mymr}]/u; // between words
const ENDS = /[.,:;!?…'’‘]/; // of sentences: part of a word only inside of it, as in 14:30
const ENTITY = /&(?:#\d{1,7}|#x[\da-f]{1,6}|\w+);/gi; // one character

/**
 * Gives parts of a text their marks: [{from, to, mark}] in their own `text`. tokens: what marked's lexer makes of text, from `at` on.
 * ranges: {from, to, mark} in text, in order.
 */
export function place(tokens, text, ranges, at = 0) { // at: behind what was found last
  const hit = (from, to) => ranges.some(range => range.from < to && range.to > from);

  const placeAll = (list, to) => {
    for (const token of list ?? []) {
      const found = at + text.slice(at, to).indexOf(token.raw); // not there as it is where lines of it begin with ">" or blanks
      const end = found < at ? to : found + token.raw.length;
      if (found >= at) at = found;
      if (hit(at, end)) placeOne(token, end);
      if (found >= at || end < to) at = Math.max(at, end);
    }
  };

  const placeOne = (token, to) => {
    if (token.type === "list")
      for (const item of token.items) placeAll([item], to);
    else if (token.type === "table") {
      for (const cell of token.header) placeAll(cell.tokens, to);
      at += text.slice(at, to).match(/^[^\n]*\n[^\n]*/)?.[0].length ?? 0; // the line below the header
      for (const cell of token.rows.flat()) placeAll(cell.tokens, to);
    } else if (token.type === "link" || token.type === "image" || token.type === "def") return; // no button in a link
    else if (token.tokens) {
      if (token.type === "list_item") at += /^[ \t]*(?:[*+-]|\d{1,9}[.)])/.exec(token.raw)?.[0].length ?? 0;
      placeAll(token.tokens, to);
    } else if (typeof token.text === "string") token.marks = marksOf(token.text, linesOf(token, to));
  };

  /** Lines of a part, each where it stands. */
  const linesOf = (token, to) => {
    if (token.type === "code" && /^\s*(?:```|~~~)/.test(token.raw)) at += text.slice(at, to).indexOf("\n") + 1;
    else if (token.type === "escape") at += 1;
    const lines = [];
    let from = 0;
    for (const line of token.text.split("\n")) {
      const found = text.slice(at, to).indexOf(line);
      if (found < 0) break;
      lines.push({from, at: at + found, length: line.length});
      at += found + line.length;
      from += line.length + 1;
      if (from <= token.text.length && text[at] === "\n") at += 1;
    }
    return lines;
  };

  const marksOf = (own, lines) => {
    const entities = [...own.matchAll(ENTITY)].map(({index, 0: entity}) => [index, index + entity.length]);
    const marks = [];
    for (const line of lines)
      for (const range of ranges) {
        if (range.from >= line.at + line.length || range.to <= line.at) continue;
        let from = line.from + Math.max(0, range.from - line.at);
        let to = line.from + Math.min(line.length, range.to - line.at);
        const part = own.slice(from, to);
        if (!part.trim()) continue;
        from += part.length - part.trimStart().length;
        to -= part.length - part.trimEnd().length;
        const last = marks.at(-1);
        if (to <= last?.to) continue; // in a word that is marked
        [from, to] = wordAround(own, from, to, entities);
        if (from < last?.to) last.to = to;
        else marks.push({from, to, mark: range.mark});
      }
    return marks;
  };

  placeAll(tokens, text.length);
}

/** The word that a part of a text stands in. */
function wordAround(text, from, to, entities) {
  let first = from, last = to;
  while (first > 0 && !STOPS.test(text[first - 1])) --first;
  while (last < text.length && !STOPS.test(text[last])) ++last;
  while (first < from && ENDS.test(text[first])) ++first;
  while (last > to && ENDS.test(text[last - 1])) --last;
  for (const [start, end] of entities)
    if (start < last && end > first) [first, last] = [Math.min(first, start), Math.max(last, end)];
  return [first, last];
}

// The tokens of an answer: what the server says of each, made plain, and what PCD changed. Pure functions.
//
// A token: {id, text, n, strength, options}; n is 1, or how many tokens this character was made of: the server tells the last one only.
// Its options, itself among them: {id, text, bytes, model, local, pcd}; bytes only where they are part of a character.
// model, local and pcd are probabilities: softmax of L (standard), of L* (over-rotated, without most of the context) and of the
// contrasted logits. null: there was no twin (local), or PCD took the token out (pcd).

const encoder = new TextEncoder();

const probability = logarithm => typeof logarithm === "number" ? Math.exp(logarithm) : null;

/** The server leaves out what is no whole character. */
const isPart = ({token, bytes}) => token.includes("\uFFFD") || (bytes && bytes.length !== encoder.encode(token).length);

/** A token of a streamed answer. */
export function tokenOf(entry, n) {
  const options = new Map();
  const add = (option, rows) => options.set(option.id, {
    id: option.id,
    text: option.token,
    ...(isPart(option) ? {bytes: option.bytes ?? []} : {}),
    model: probability(rows ? rows.standard : option.logprob),
    local: probability(rows?.local),
    pcd: probability(rows ? rows.contrasted : option.logprob),
  });
  for (const option of entry.top_logprobs ?? []) add(option, option.pcd);
  for (const option of entry.pcd?.pushed_out ?? []) add(option, option);
  if (options.size && !options.has(entry.id)) add(entry, entry.pcd);
  return {id: entry.id, text: entry.token, n, strength: entry.pcd?.strength ?? null, options: [...options.values()]};
}

const best = (options, row) => options.reduce((a, b) => (b[row] ?? -1) > (a[row] ?? -1) ? b : a);

/** What the model alone would most probably have said, where PCD changed that; else null. */
export function replaced(token) {
  if (token.strength === null || !token.options.length) return null;
  const first = best(token.options, "model");
  return first.id !== token.id && first.id !== best(token.options, "pcd").id ? first : null;
}

/** The candidates of a token, the most probable first, then those that PCD took out. */
export function candidates(token) {
  return [...token.options].sort((a, b) => (b.pcd ?? -1) - (a.pcd ?? -1) || (b.model ?? -1) - (a.model ?? -1));
}

/** A token for the eye: white space, and what is no character of its own, is named. */
export function shown({text, bytes}) {
  if (bytes?.length) return bytes.map(byte => `<${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "end";
}

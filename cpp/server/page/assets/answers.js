// Answers: what is asked of the server for one, and what comes back as it is written. Knows messages and the server, not the screen.

import * as api from "./api.js";
import {tokenOf} from "./tokens.js";

export const THINK = "<think>\n"; // which some templates write themselves, so that it is not in the answer
const N_OPTIONS = 8; // candidates that are kept of each token

/** The talk as a chat template takes it. */
function messagesOf(path, system) {
  const messages = system ? [{role: "system", content: system}] : [];
  for (const message of path) {
    const content = message.role === "user" ? contentOf(message) : (message.thinks ? THINK : "") + message.text;
    if (!content) continue;
    const last = messages.at(-1);
    if (last?.role === message.role) last.content += "\n\n" + content; // an answer is missing, and templates want turns
    else messages.push({role: message.role, content});
  }
  return messages;
}

/** Files come first: what is asked last is answered best. */
const contentOf = ({text, files = []}) =>
  [...files.map(file => `${file.name}:\n\n${file.text}`), text].filter(Boolean).join("\n\n");

/** How many tokens the server has to read for an answer. */
export const promptSize = async (path, {model, system}) => api.tokenCount(model, await api.template(model, messagesOf(path, system)));

/**
 * The field "pcd" of a request that goes on with an answer. min_first_entropy decides once, by an answer's first token: that has been
 * decided, so it is not asked again.
 */
function continued(answer) {
  if (!answer.pcd?.min_first_entropy) return answer.pcd;
  return answer.decided ? {...answer.pcd, min_first_entropy: 0} : false;
}

const textOf = tokens => tokens.map(token => token.text).join("");

/** The tokens that stay, as they were; as text where some of a character are not known. */
function continuedPrompt(prompt, kept) {
  if (!kept.length) return prompt;
  const known = kept.findLastIndex(token => token.n > 1) + 1;
  const start = prompt + textOf(kept.slice(0, known));
  return known === kept.length ? start : [start, ...kept.slice(known).map(token => token.id)];
}

/**
 * Writes an answer: fills message as it comes, and calls changed() each time.
 *
 * message: of an assistant, with model, system, sampling (fields of the request), seed and pcd (its field: false or an object).
 * path: the talk before it. options: {n_predict, signal}.
 * before: the answer that this one goes on with; kept: its tokens that stay.
 */
export async function write(message, path, options, changed, before = null, kept = []) {
  message.tokens = [...kept];
  message.text = textOf(kept);
  message.decided = before?.decided;
  try {
    const prompt = await api.template(message.model, messagesOf(path, message.system));
    if (/<think>\s*$/.test(prompt)) message.thinks = true;
    const body = {
      model: message.model,
      prompt: continuedPrompt(prompt, kept),
      pcd: before ? continued(before) : message.pcd,
      ...message.sampling, seed: message.seed, n_predict: options.n_predict,
      n_probs: N_OPTIONS, return_progress: true, timings_per_token: true,
    };
    for await (const part of api.completion(body, options.signal)) {
      take(message, part);
      changed();
    }
  } catch (error) {
    message.ended = options.signal.aborted ? "stopped" : "lost";
    if (!options.signal.aborted) throw error;
  } finally {
    delete message.progress;
    delete message.n_told;
    changed();
  }
}

function take(message, part) {
  if (part.prompt_progress) message.progress = {...part.prompt_progress, at: performance.now()};
  for (const entry of part.completion_probabilities ?? []) {
    const told = message.n_told ?? 0;
    message.n_told = part.tokens_predicted ?? told + 1;
    message.tokens.push(tokenOf(entry, Math.max(1, message.n_told - told)));
    message.text += entry.token;
    delete message.progress;
  }
  const {timings} = part;
  if (timings && (timings.predicted_n || part.stop)) {
    message.stats = {
      read: timings.prompt_n, cached: timings.cache_n, written: timings.predicted_n,
      readPerSecond: timings.prompt_per_second ?? 0, perSecond: timings.predicted_per_second ?? 0,
      twins: timings.pcd_twins ?? 0, contrasted: timings.pcd_contrasted ?? 0,
      did: timings.pcd_answer, passages: timings.passages, leftOut: timings.passages_left_out,
    };
    // the first token may have had a twin before it was seen to be sure: only more than that is for an answer that is contrasted
    message.decided ||= message.stats.contrasted > 0 || message.stats.twins > 1;
  }
  if (part.stop) message.ended = part.truncated ? "full" : part.stop_type === "limit" ? "limit" : "stop";
}

// Answers: what is asked of the server for one, and what comes back as it is written. Knows messages and the server, not the screen.

import * as api from "./api.js";
import * as images from "./images.js";
import {tokenOf} from "./tokens.js";

export const THINK = "<think>\n"; // which some templates write themselves, so that it is not in the answer
const N_OPTIONS = 8; // candidates that are kept of each token

/** The talk as a chat template takes it. sees: whether the model sees pictures; where it does not, they are left out. */
function messagesOf(path, system, sees, of = contentOf) {
  const messages = system ? [{role: "system", content: system}] : [];
  for (const message of path) {
    const content = message.role === "user" ? of(message, sees) : (message.thinks ? THINK : "") + message.text;
    if (!content) continue;
    const last = messages.at(-1);
    if (last?.role === message.role) last.content = images.joined(last.content, content); // an answer is missing, and templates want turns
    else messages.push({role: message.role, content});
  }
  return messages;
}

const isText = file => !file.image;

/** Files come first: what is asked last is answered best. A text is what the server makes of the file. */
const contentOf = ({text, files = []}, sees) =>
  images.contentOf(sees ? files : [], [...files.filter(isText).map(file => file.text), text].filter(Boolean).join("\n\n"));

export const hasTexts = path => path.some(({files = []}) => files.some(isText));

/** With texts as files: then the server can put passages of them before the question once more. */
function withFiles({text, files = []}, sees) {
  const parts = files.filter(isText).map(({name, text, pages, unit, note}) => ({type: "file", file: {filename: name, text, pages, unit, note}}));
  const others = contentOf({text, files: files.filter(file => file.image)}, sees);
  return parts.length ? [...parts, ...images.partsOf(others).filter(part => part.text !== "")] : others;
}

/** How many tokens the server has to read for an answer, without those of pictures. */
export const promptSize = async (path, {model, system}, sees) => {
  const prompt = await api.template(model, messagesOf(path, system, sees, withFiles), false);
  return Array.isArray(prompt) ? prompt.length : api.tokenCount(model, prompt); // tokens if there are documents
};

/**
 * The field "pcd" of a request that goes on with an answer. min_first_entropy decides once, by an answer's first token: that has been
 * decided, so it is not asked again.
 */
function continued(answer) {
  if (!answer.pcd?.min_first_entropy) return answer.pcd;
  return answer.decided ? {...answer.pcd, min_first_entropy: 0} : false;
}

const textOf = tokens => tokens.map(token => token.text).join("");

/**
 * The tokens that stay, as they were; as text where some of a character are not known, or of a chat, which may hold some back. prompt: a
 * text, or tokens if there are documents in it.
 */
function continuedPrompt(prompt, kept, isChat) {
  if (!kept.length) return prompt;
  const known = kept.findLastIndex(token => token.n > 1 || (isChat && !token.chosen)) + 1;
  const text = textOf(kept.slice(0, known));
  const start = typeof prompt === "string" ? [prompt + text] : text ? [...prompt, text] : prompt;
  return known === kept.length && typeof prompt === "string" ? start[0] : [...start, ...kept.slice(known).map(token => token.id)];
}

/**
 * Writes an answer: fills message as it comes, and calls changed() each time.
 *
 * message: of an assistant, with model, system, sampling (fields of the request), seed, pcd (its field: false or an object) and replay.
 * path: the talk before it. options: {n_predict, signal}.
 * before: the answer that this one goes on with; kept: its tokens that stay. options.sees: whether the model sees pictures.
 */
export async function write(message, path, options, changed, before = null, kept = []) {
  message.tokens = [...kept];
  message.text = textOf(kept);
  message.decided = before?.decided;
  try {
    const asked = {model: message.model, ...message.sampling, seed: message.seed, return_progress: true, timings_per_token: true};
    const stream = hasTexts(path) && !before ? chatOf(message, path, options, asked) : await completionOf(message, path, options, asked, before, kept);
    for await (const part of stream) {
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

async function completionOf(message, path, options, asked, before, kept) {
  const messages = messagesOf(path, message.system, options.sees, withFiles);
  const prompt = await api.template(message.model, messages, message.replay);
  const seen = images.imagesOf(messages);
  if (/<think>\s*$/.test(prompt)) message.thinks = true;
  const whole = seen.length ? {prompt_string: prompt + textOf(kept), multimodal_data: seen} : continuedPrompt(prompt, kept, hasTexts(path));
  return api.completion({...asked, prompt: whole, pcd: before ? continued(before) : message.pcd, n_predict: options.n_predict, n_probs: N_OPTIONS}, options.signal);
}

/** Each answer of a chat says what it thinks in its text. */
const chatOf = (message, path, options, asked) => api.chat({
  ...asked, messages: messagesOf(path, message.system, options.sees, withFiles), replay: message.replay,
  pcd: message.pcd, max_tokens: options.n_predict, logprobs: true, top_logprobs: N_OPTIONS, reasoning_format: "none",
}, options.signal);

function take(message, part) {
  if (part.prompt_progress) message.progress = part.prompt_progress;
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
      perSecond: timings.predicted_per_second ?? 0,
      did: timings.pcd_answer, passages: timings.passages, note: timings.passages_note, documents: timings.documents_read,
      leftOut: timings.documents_note,
    };
    // the first token may have had a twin before it was seen to be sure: only more than that is for an answer that is contrasted
    message.decided ||= timings.pcd_contrasted > 0 || timings.pcd_twins > 1;
  }
  if (part.stop) message.ended = part.truncated ? "full" : part.stop_type === "limit" ? "limit" : "stop";
}

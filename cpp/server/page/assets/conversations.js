// Conversations: trees of messages, kept in this browser. Editing, answering again and going on from another token make a new version
// beside the old one; nothing is lost. Knows nothing of the server or the screen.
//
// A message: {id, parent, role: "user" | "assistant", text, made} and
//   of a user:       files: [{name, text, count, pages (where they begin), unit (what these are), note (what is left out), image (a data URL, in place of a text)}]
//   of an assistant: model, system, sampling (fields of the request), tokens (see tokens.js), setting (its name), pcd and replay (fields of
//                    the request), decided, seed, stats, pair (the same of two answers that are compared), ended ("stop", "limit", "full",
//                    "stopped", "lost"; undefined: it is being written)

import {createStore, delMany, get, getMany, keys, set, update} from "./vendor/idb-keyval/index.js";

const FORMAT = 1; // of exported files
const store = createStore("pypcd", "conversations");
const LONGEST_TITLE = 120;

const newId = () => Date.now().toString(36) + Math.floor(Math.random() * 2 ** 40).toString(36);

export class Conversation {
  constructor({id = newId(), title = "", changed = Date.now(), at = null, messages = []} = {}) {
    Object.assign(this, {id, title, changed, at});
    this.messages = new Map(messages.map(message => [message.id, message]));
  }

  add(fields) {
    const message = {id: newId(), made: Date.now(), ...fields};
    this.messages.set(message.id, message);
    this.at = message.id;
    if (!this.title && message.role === "user") this.title = titleOf(message);
    return message;
  }

  /** Takes back a message that nothing hangs on. */
  remove(message) {
    this.messages.delete(message.id);
    if (this.at === message.id) this.at = this.versions(message).at(-1)?.id ?? message.parent;
  }

  /** From the first message to this one. */
  path(id = this.at) {
    const path = [];
    for (let message = this.messages.get(id); message; message = this.messages.get(message.parent)) path.unshift(message);
    return path;
  }

  versions(message) {
    return [...this.messages.values()].filter(other => other.parent === message.parent && other.role === message.role);
  }

  /** Shows another version, with the newest of what followed it. */
  show(message) {
    let last = message;
    const newest = new Map([...this.messages.values()].map(other => [other.parent, other]));
    for (let next = last; next; next = newest.get(last.id)) last = next;
    this.at = last.id;
  }

  /** The two answers that are being compared at the end of the talk, in the order in which they were asked for; else null. */
  pair() {
    const message = this.messages.get(this.at);
    if (!message?.pair) return null;
    const both = this.versions(message).filter(other => other.pair === message.pair);
    return both.length === 2 ? both : null;
  }

  /** Ends the comparison: the talk goes on from this answer. */
  choose(message) {
    for (const other of this.pair() ?? []) delete other.pair;
    this.at = message.id;
  }

  plain() {
    return {id: this.id, title: this.title, changed: this.changed, at: this.at, messages: [...this.messages.values()]};
  }
}

const titleOf = message => (message.text.trim() || message.files?.[0]?.name || "Untitled").replace(/\s+/g, " ").slice(0, LONGEST_TITLE);

// -- kept in the browser: a head for the list, and a body --------------------------------------------------------------

export async function list() {
  const names = (await keys(store)).filter(name => name.startsWith("head:"));
  return (await getMany(names, store)).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

export async function load(id) {
  const found = await get("body:" + id, store);
  return found ? new Conversation(found) : null;
}

/** Another tab may have added messages to the same conversation, or renamed it: that stays. changed: when, in ms since 1970. */
export async function save(conversation, changed = Date.now()) {
  if (conversation.isGone) return; // it was deleted while an answer was written
  const {id} = conversation;
  await update("body:" + id, other => { // in one transaction
    for (const message of other?.messages ?? [])
      if (!conversation.messages.has(message.id) && (message.role === "user" || message.ended)) conversation.messages.set(message.id, message);
    conversation.title = other?.title || conversation.title;
    conversation.changed = Math.max(other?.changed ?? 0, changed);
    return structuredClone(conversation.plain());
  }, store);
  await putHead(conversation);
}

const putHead = ({id, title, changed}) => set("head:" + id, {id, title, changed}, store);

/** It keeps its place in the list. */
export async function rename(id, title) {
  await update("body:" + id, found => found && {...found, title}, store);
  await putHead({...await get("head:" + id, store), id, title});
}

/** The ids of those that have all of these words, in their titles or in what was said. */
export async function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const bodies = await getMany((await keys(store)).filter(name => name.startsWith("body:")), store);
  const said = ({title, messages}) => [title, ...messages.flatMap(({text, files = []}) => [text, ...files.map(file => file.name)])].join("\n").toLowerCase();
  return new Set(bodies.filter(Boolean).filter(body => words.every(word => said(body).includes(word))).map(({id}) => id));
}

export const remove = id => delMany(["head:" + id, "body:" + id], store);

// -- files -----------------------------------------------------------------------------------------------------------

export async function exported() {
  const heads = await list();
  const conversations = (await Promise.all(heads.map(head => load(head.id)))).filter(Boolean).map(found => found.plain());
  return JSON.stringify({pypcd: FORMAT, conversations});
}

/** Keeps the conversations of a file beside those that are there; how many. Throws an Error where it is not such a file. */
export async function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  if (file?.pypcd !== FORMAT || !Array.isArray(file.conversations)) throw new Error("it was not exported from here");
  const read = file.conversations.map(conversationOf); // all before the first is kept
  for (const conversation of read) await save(conversation, conversation.changed);
  return read.length;
}

// What is taken of a file, which comes from anywhere: known fields, each of its type or such a text. "?": it may be missing, or null.
const TOKEN = {
  id: "number", text: "string", n: "number", "strength?": "number", "chosen?": "boolean",
  options: [{id: "number", text: "string", "bytes?": ["number"], "model?": "number", "local?": "number", "pcd?": "number"}],
};
const STATS = {
  read: "number", cached: "number", written: "number", perSecond: "number", "did?": "string", "note?": "string", "documents?": "string", "leftOut?": "string",
  "passages?": [{text: "string", document: "string", place: "string", begin: "number", end: "number"}],
};
const MESSAGE = {
  id: "string", "parent?": "string", role: /^(user|assistant)$/, text: "string", made: "number",
  "files?": [{
    name: "string", text: "string", "count?": "number", "pages?": ["number"], "unit?": "string", "note?": "string",
    "image?": /^data:image\/(png|jpeg);base64,[A-Za-z\d+/]+=*$/,
  }],
  "tokens?": [TOKEN], "model?": "string", "system?": "string", "setting?": "string", "pcd?": "object|boolean", "replay?": "boolean",
  "decided?": "boolean", "thinks?": "boolean", "seed?": "number", "pair?": "string", "stats?": STATS,
  "ended?": /^(stop|limit|full|stopped|lost)$/,
  "sampling?": {
    "temperature?": "number", "top_k?": "number", "top_p?": "number", "min_p?": "number", "repeat_penalty?": "number", "stop?": ["string"],
  },
};

function taken(value, shape, name) {
  if (shape instanceof RegExp ? typeof value === "string" && shape.test(value) : typeof shape === "string" && shape.includes(typeof value))
    return value;
  if (Array.isArray(shape) && Array.isArray(value)) return value.map(one => taken(one, shape[0], name));
  if (shape.constructor !== Object || typeof value !== "object" || value === null)
    throw new Error(`${JSON.stringify(value)?.slice(0, 40) ?? "nothing"} stands where "${name}" should`);
  const made = {};
  for (const [key, of] of Object.entries(shape)) {
    const field = key.replace("?", "");
    const found = Object.hasOwn(value, field) ? value[field] : undefined;
    if (found === null && field !== key) made[field] = null;
    else if (found !== undefined || field === key) made[field] = taken(found, of, field);
  }
  return made;
}

function conversationOf(value) {
  const read = taken(value, {id: "string", title: "string", changed: "number", "at?": "string", messages: [MESSAGE]}, "conversations");
  const conversation = new Conversation({...read, changed: Math.min(read.changed, Date.now())});
  const known = new Set([null]); // a message stands behind the one that it follows: so there is no circle
  for (const message of read.messages) {
    if (!known.has(message.parent)) throw new Error("a message is missing");
    known.add(message.id);
    if (message.role === "assistant") Object.assign(message, {tokens: [], model: "", setting: "off", pcd: false, ended: "lost", ...message});
  }
  if (!known.has(read.at)) throw new Error("a message is missing");
  return conversation;
}

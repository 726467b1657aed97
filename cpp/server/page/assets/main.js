// The page: what is shown, and what a person does. What it looks like is in views.js; start reading here.
//
//   main.js ── views.js ── sidebar.js, dialogs.js, documents.js, markdown.js, tokens.js
//          ├── answers.js ── api.js
//          ├── listing.js ── conversations.js
//          └── settings.js, files.js, follow.js, browser.js

import {render} from "./vendor/lit-html/lit-html.js";
import * as answers from "./answers.js";
import * as api from "./api.js";
import {copy} from "./browser.js";
import * as conversations from "./conversations.js";
import * as documents from "./documents.js";
import * as files from "./files.js";
import {follow, grown} from "./follow.js";
import {listActions} from "./listing.js";
import * as settings from "./settings.js";
import {grouped, page} from "./views.js";
import * as images from "./images.js";

const LONG_PASTE = 2000; // characters; a longer one becomes a file
const FRAME = 60; // ms between two pictures of an answer that is being written, at least

const state = {
  conversation: new conversations.Conversation(),
  list: [], // of the conversations: {id, title, changed}
  settings: settings.load(),
  models: [], // {id, isLoaded}
  props: null, // of the chosen model; null: it is not loaded, or the server has not answered yet
  loading: "", // the model that is
  reading: "", // the file that is
  error: "", // a sentence
  said: "", // for screen readers
  draft: {text: "", files: []}, // the next message
  editing: null, // {id, text, files}
  open: null, // {id, index} of a token
  document: null, // {name, place, pieces} of the one that is read
  asTokens: new Set(), // ids of answers whose tokens are shown
  opening: null, // a promise: the conversation that a person has chosen is being read
  busy: new Set(), // conversations that an answer is asked for, or written in
  runs: new Map(), // id of an answer that is being written -> {controller, conversation}
  isWide: true, // enough for the list of conversations beside the talk
  search: "", // in the conversations
  found: null, // ids of those that have it; null: nothing is searched for
  renaming: null, // id of a conversation
  deleted: null, // the last conversation that was, until something else is done with the list
  panel: null, // "settings", "pcd", "conversations"
};

// -- showing ----------------------------------------------------------------------------------------------------------

let waiting = 0;
let wasWriting = false; // at the last picture
let took = 0; // ms that the last picture took: a long answer gets fewer

function show() {
  clearTimeout(waiting);
  waiting = 0;
  const start = performance.now();
  const {colours} = state.settings;
  document.documentElement.style.colorScheme = colours === "system" ? "" : colours;
  const hadFocus = document.activeElement !== document.body;
  try {
    render(page(state, actions), document.body);
  } catch (error) { // nothing that is kept may keep a person out
    if (!state.conversation.messages.size) throw error;
    state.conversation = new conversations.Conversation();
    state.error = `This conversation cannot be shown: ${error.message}`;
    render(page(state, actions), document.body);
  }
  for (const dialog of document.querySelectorAll("dialog")) {
    const wanted = dialog.dataset.open === "true";
    if (wanted && !dialog.open) dialog.showModal();
    else if (!wanted && dialog.open) dialog.close(); // gives the focus back
  }
  if (hadFocus && document.activeElement.matches("body, :disabled")) // what had it is gone: else the keyboard begins at the top again
    (document.querySelector("dialog[open] button:enabled") ?? document.getElementById("message"))?.focus();
  if (state.runs.size || wasWriting) grown(); // the last picture of an answer is longer too
  wasWriting = state.runs.size > 0;
  took = performance.now() - start;
}

function showSoon() {
  waiting ||= setTimeout(() => requestAnimationFrame(show), Math.max(FRAME, 3 * took));
}

function fail(error) {
  state.error = error.message;
  state.said = "";
  show();
}

/** An action of the page: what it throws is told in a sentence. */
const told = action => async (...args) => {
  try {
    await action(...args);
  } catch (error) {
    fail(error);
  }
  show();
};

// -- the server ---------------------------------------------------------------------------------------------------------

async function connect() {
  for (;;) {
    try {
      state.models = settings.ownModels(await api.models());
      break;
    } catch (error) {
      if (error.status !== 503) throw error;
      state.loading = "the model";
      show();
      await new Promise(done => setTimeout(done, 500));
    }
  }
  state.error = state.loading = "";
  if (!state.models.length) throw new Error("This server has no model.");
  const {models} = state;
  state.settings.model = (models.find(own => own.id === state.settings.model) ?? models.find(own => own.isLoaded) ?? models[0]).id;
}

async function begin() {
  await connect();
  if (state.models.find(own => own.id === state.settings.model).isLoaded) await choose();
}

/** Before each answer: by now another server may listen here. */
async function ready() {
  await connect();
  await choose();
}

/** Asks what the chosen model can do; a server of several models loads it for that. */
async function choose() {
  const {model} = state.settings;
  if (!state.models.find(own => own.id === model)?.isLoaded) {
    state.props = null;
    state.loading = model;
    show();
  }
  try {
    const props = await api.props(model);
    if (model === state.settings.model) state.props = props;
  } finally {
    if (model === state.settings.model) state.loading = "";
  }
}

/** What is too long is not sent: the server would refuse it, and this and all that is said later with it. */
async function checkRoom(path) {
  const size = state.props.default_generation_settings.n_ctx;
  const n = await answers.promptSize(path, state.settings, images.sees(state.props)); // with the parts of files that will be read
  if (n < size) return;
  const [takes, has] = [n, size].map(one => grouped.format(one));
  throw new Error(path.length > 1 ? `This takes ${takes} tokens with what was said before, and the context has ${has}. Shorten it, or begin a new conversation.`
    : `This takes ${takes} tokens, and the context has ${has}. Shorten it, or start the server with a larger context.`);
}

// -- answers -----------------------------------------------------------------------------------------------------------

const newSeed = () => state.settings.seed === "" ? Math.floor(Math.random() * 2 ** 32) : Number(state.settings.seed);

/** Writes one answer behind conversation.at, or another version of one. after: what it waits for. */
async function answer(conversation, fields, {before = null, kept = [], after = null} = {}) {
  const controller = new AbortController();
  const {model, system, n_predict} = state.settings;
  const sampling = settings.samplingOf(state.settings);
  const message = conversation.add({role: "assistant", text: "", tokens: [], model, system, sampling, ...fields});
  state.runs.set(message.id, {controller, conversation});
  state.error = "";
  show();
  if (conversation === state.conversation) follow();
  try {
    await after;
    const path = conversation.path(message.parent);
    await answers.write(message, path, {n_predict, signal: controller.signal, sees: images.sees(state.props)}, showSoon, before, kept);
  } finally {
    if (message.tokens.length === kept.length && message.ended !== "stop") conversation.remove(message);
    try {
      await keep(conversation);
    } finally {
      state.runs.delete(message.id); // after it was kept: who sees that it is complete may close the page
    }
  }
}

async function keep(conversation) {
  await conversations.save(conversation);
  state.list = await conversations.list();
  if (state.found) state.found = await conversations.search(state.search);
}

const withPcd = chosen => ({pcd: settings.pcdOf(chosen, state.props?.pcd), setting: settings.labelOf(chosen, state.props?.pcd)});

/** Answers the last message of the talk. compare: "pcd" or "replay", for one answer without it and one with it. */
async function reply(conversation, parent, compare = "") {
  const fields = {parent, seed: newSeed(), replay: state.settings.replay, ...withPcd(state.settings)};
  if (compare) {
    const {pcd} = state.props;
    if (compare === "pcd" && !pcd?.presets) throw new Error(`There is nothing to compare with: ${pcd?.refusal ?? "this server runs without PCD"}.`);
    fields.pair = parent + fields.seed;
    const [without, having] = compare === "replay" ? [{replay: false}, {replay: true}]
      : [{pcd: false, setting: "off"}, withPcd(settings.turnedOn(state.settings, pcd))];
    const first = answer(conversation, {...fields, ...without});
    // behind it, in the same slot of the server, whose cache has the prompt: at once it would be read twice
    const results = await Promise.allSettled([first, answer(conversation, {...fields, ...having}, {after: first.catch(() => {})})]);
    for (const result of results) if (result.status === "rejected") throw result.reason;
  } else await answer(conversation, fields);
  const last = conversation.messages.get(conversation.at);
  if (conversation === state.conversation && last?.role === "assistant")
    state.said = compare ? "Both answers are complete." : `Answer: ${last.text}`;
}

/** One thing after the other in a conversation: what is asked for while an answer is written, or its model loaded, is not done. */
async function alone(action) {
  const {conversation, busy} = state;
  if (busy.has(conversation)) return;
  busy.add(conversation);
  const before = document.activeElement;
  try {
    await action(conversation);
  } finally {
    busy.delete(conversation);
    show();
    const {activeElement} = document;
    if (conversation === state.conversation && (activeElement === before || activeElement === document.body)) focusOnMessage();
  }
}

/** The next thing to do, unless a person is doing another one; without a keyboard that would cover the page. */
function focusOnMessage() {
  if (matchMedia("(pointer: fine)").matches) document.getElementById("message")?.focus({preventScroll: true});
}

/** To the conversation that a person has chosen, though it may not be shown yet. */
const ask = compare => told(async () => {
  while (state.opening) await state.opening;
  await alone(conversation => send(conversation, compare));
});

async function send(conversation, compare) {
  if (attaching) await attaching; // a file that cannot be read is told, and nothing is sent without it
  if (conversation !== state.conversation) return;
  await say(conversation, conversation.at, state.draft, () => {
    if (conversation.pair()) conversation.choose(conversation.messages.get(conversation.at));
    state.draft = {text: "", files: []};
  }, compare);
}

/** A message behind another one, and its answer. done: called when it is sent. */
async function say(conversation, parent, {text, files}, done, compare = "") {
  const question = {role: "user", text: text.trim(), files};
  if (!question.text && !files.length) return;
  await ready();
  images.check(files, state.props);
  await checkRoom([...conversation.path(parent), question]);
  done();
  const message = conversation.add({...question, parent});
  state.said = "Answering.";
  show();
  follow();
  await keep(conversation).catch(fail); // a page that is closed now has the question
  await reply(conversation, message.id, compare);
}

const focusOn = id => document.getElementById(id)?.focus();

let attaching = null; // files that are being read

/** One after the other. */
function attach(given) {
  const before = attaching;
  const mine = attaching = (async () => {
    await before?.catch(() => {}); // told already
    await readAll(given);
  })().finally(() => { if (attaching === mine) attaching = null });
  return mine;
}

async function readAll(given) {
  state.error = "";
  const failed = [];
  for (const file of given) {
    state.reading = file.name;
    show();
    try {
      images.check([file], state.props);
      const read = await files.read(file, state.settings.model);
      state.draft.files.push(read); // by now it may be another draft
    } catch (error) { // the others are read all the same
      failed.push(error.message);
    } finally {
      state.reading = "";
    }
  }
  if (failed.length) throw new Error(failed.join(" "));
}

// -- what a person does ----------------------------------------------------------------------------------------------

const actions = {
  send: ask(""),
  compare: ask("pcd"),
  compareReplay: ask("replay"),
  stop(conversation = state.conversation) {
    for (const run of state.runs.values()) if (run.conversation === conversation) run.controller.abort();
  },
  type(text) {
    state.draft.text = text;
    show();
  },
  paste(event) {
    const text = event.clipboardData.getData("text/plain");
    const files = [...event.clipboardData.files].filter(file => !text || !images.isImage(file)); // a table comes with its picture
    if (!files.length && text.length <= LONG_PASTE) return;
    event.preventDefault();
    actions.attach(files.length ? files : [new File([text], `pasted-${state.draft.files.length + 1}.txt`)]);
  },
  attach: told(attach),
  detach(of, file) {
    of.files = of.files.filter(other => other !== file);
    show();
  },

  retry: told(message => alone(async conversation => {
    await ready();
    await reply(conversation, message.role === "user" ? message.id : message.parent);
  })),
  edit(message) {
    const before = state.editing?.id;
    state.editing = message && {id: message.id, text: message.text, files: message.files ?? []};
    show();
    focusOn(message ? "edit" : "edit-" + before);
  },
  retype(text) {
    state.editing.text = text;
  },
  sendAgain: told(message => alone(conversation => say(conversation, message.parent, state.editing, () => {
    state.editing = null;
    focusOn("message");
  }))),
  goOn: told((message, index, option) => alone(async conversation => {
    state.open = null;
    const {parent, model, system, sampling, setting, pcd, replay, seed} = message; // as it was, whatever is set now
    await connect();
    if (!state.models.some(own => own.id === model)) // tokens are numbers, which another model reads in another way
      throw new Error(`This answer is of the model ${model}, which this server does not have.`);
    if (!state.props) await choose();
    const kept = message.tokens.slice(0, index);
    if (option) kept.push({...message.tokens[index], id: option.id, text: option.text, n: 1, chosen: true});
    const writing = answer(conversation, {parent, model, system, sampling, setting, pcd, replay, seed}, {before: message, kept});
    if (option) state.asTokens.add(conversation.at);
    show();
    await writing;
  })),

  version(message, label) {
    state.conversation.show(message);
    keep(state.conversation).catch(fail);
    show();
    const buttons = [...document.getElementById("versions-" + message.id)?.querySelectorAll("button:enabled") ?? []];
    (buttons.find(button => button.ariaLabel === label) ?? buttons[0])?.focus();
  },
  choose(message) {
    actions.stop(); // the other one may be written still
    state.conversation.choose(message);
    keep(state.conversation).catch(fail);
    show();
  },
  copy: told(async (text, button) => {
    await copy(text);
    state.said = "Copied.";
    button.textContent = "Copied"; // for those who see; its name stays
    setTimeout(() => { button.textContent = button.ariaLabel }, 1500);
  }),
  tokens(message) {
    if (!state.asTokens.delete(message.id)) state.asTokens.add(message.id);
    show();
  },
  open(message, index) {
    state.open = message && {id: message.id, index};
    show();
  },
  document(found) {
    state.document = found;
    show();
    document.querySelector("dialog[open] mark")?.scrollIntoView();
  },
  read: file => actions.document(documents.opened(file)),
  passage: told((message, passage) => actions.document(documents.openedAt(state.conversation.path(message.id), passage))),

  panel(name) {
    if (!name) document.activeElement.blur(); // a field that is being filled in tells its value while it is there
    state.panel = name;
    state.deleted = null;
    if (name === "conversations") refresh();
    show();
  },
  set: (name, value) => {
    state.settings[name] = value;
    settings.save(state.settings);
    if (name === "model") told(choose)();
    show();
    if (name === "setting") document.getElementById("custom")?.scrollIntoView(); // it is the last of the list
  },
  key: told(async value => {
    api.key.set(value);
    await begin();
  }),
  dismiss() {
    state.error = "";
    show();
  },
};
Object.assign(actions, listActions({state, told, show, stop: actions.stop}));

const refresh = told(async () => { state.list = await conversations.list() });

// -- start -------------------------------------------------------------------------------------------------------------

for (const name of ["dragover", "dragleave", "drop"])
  addEventListener(name, event => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.documentElement.classList.toggle("dragging", name === "dragover" || (name === "dragleave" && event.relatedTarget !== null));
    if (name === "drop") actions.attach([...event.dataTransfer.files]);
  });
const room = matchMedia("(min-width: 60rem)");
const fit = () => {
  state.isWide = room.matches;
  if (state.isWide && state.panel === "conversations") state.panel = null;
};
room.addEventListener("change", () => { fit(); show() });
addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) actions.stop();
});

fit();
show();
focusOnMessage();
told(begin)();
told(async () => {
  state.list = await conversations.list();
  if (state.list.length) await actions.begin(await conversations.load(state.list[0].id));
})();

// What a person does with the list of conversations: begin, load, search, rename, delete, export, import.

import {download} from "./browser.js";
import * as conversations from "./conversations.js";
import {follow} from "./follow.js";

/** told: of an action, what it throws is told. stop: ends the answers of a conversation. */
export function listActions({state, told, show, stop}) {
  /** Where a conversation is in this page: shown, or written in. */
  const open = id => [...state.busy, state.conversation].filter(found => found.id === id);

  const isUntouched = conversation => !conversation.messages.size && !state.busy.has(conversation);

  /** What is being read to be shown is not shown any more. */
  function present(conversation) {
    state.opening = null;
    state.conversation = conversation;
    show();
  }

  return {
    /** The last conversation, when the page opens. */
    begin(conversation) {
      if (!conversation || state.opening || !isUntouched(state.conversation)) return;
      present(conversation);
      follow();
    },
    fresh() {
      state.panel = state.deleted = null;
      present(new conversations.Conversation());
      document.getElementById("message").focus();
    },
    load: told(id => {
      const mine = state.opening = (async () => {
        const read = await conversations.load(id);
        if (mine !== state.opening) return; // another one was chosen
        const found = open(id)[0] ?? read; // of two copies one would miss what is written in the other
        if (!found) throw new Error("This conversation is not there any more.");
        state.panel = state.deleted = null;
        present(found);
        follow();
      })().finally(() => { if (mine === state.opening) state.opening = null });
      return mine;
    }),
    search: told(async text => {
      state.search = text;
      const found = text.trim() ? await conversations.search(text) : null;
      if (state.search === text) state.found = found;
    }),
    rename(id) {
      state.renaming = id;
      show();
      document.getElementById("title").select();
    },
    retitle: told(async (id, text) => {
      if (state.renaming !== id) return;
      state.renaming = null;
      const isByKey = document.activeElement.id === "title";
      const title = text.trim();
      const head = state.list.find(one => one.id === id);
      if (title && title !== head.title) {
        head.title = title;
        for (const conversation of open(id)) conversation.title = title;
        await conversations.rename(id, title);
      }
      show();
      if (isByKey) document.getElementById("rename-" + id)?.focus();
    }),
    remove: told(async id => {
      if (state.opening) await state.opening; // else it would be shown once more
      for (const conversation of open(id)) {
        conversation.isGone = true;
        stop(conversation);
      }
      if (id === state.conversation.id) present(new conversations.Conversation());
      state.deleted = await conversations.load(id);
      await conversations.remove(id);
      state.list = await conversations.list();
    }),
    restore: told(async () => {
      const {deleted} = state;
      state.deleted = null;
      await conversations.save(deleted, deleted.changed);
      if (isUntouched(state.conversation) && !state.opening) present(deleted);
      state.list = await conversations.list();
    }),
    exportAll: told(async () => download(`pypcd-${new Date().toISOString().slice(0, 10)}.json`, await conversations.exported())),
    importAll: told(async file => {
      try {
        state.said = `${await conversations.imported(await file.text())} conversations imported.`;
      } catch (error) {
        throw new Error(`${file.name} was not imported: ${error.message}.`);
      }
      state.list = await conversations.list();
    }),
  };
}

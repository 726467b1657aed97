// What a person does with the list of conversations: begin, load, search, rename, delete, export, import.

import {download} from "./browser.js";
import * as conversations from "./conversations.js";
import {follow} from "./follow.js";

/** told: of an action, what it throws is told. stop: ends the answers of a conversation. */
export function listActions({state, told, show, stop}) {
  /** Where a conversation is in this page: shown, or written in. */
  const open = id => [...state.runs.values(), state].map(run => run.conversation).filter(found => found.id === id);

  function leaveList() {
    state.panel = state.deleted = null;
  }

  return {
    fresh() {
      state.conversation = new conversations.Conversation();
      leaveList();
      show();
      document.getElementById("message").focus();
    },
    load: told(async id => {
      const running = [...state.runs.values()].find(run => run.conversation.id === id);
      const found = running?.conversation ?? await conversations.load(id);
      if (!found) throw new Error("This conversation is not there any more.");
      state.conversation = found;
      leaveList();
      show();
      follow();
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
      for (const conversation of open(id)) {
        conversation.isGone = true;
        stop(conversation);
      }
      state.deleted = await conversations.load(id);
      await conversations.remove(id);
      if (id === state.conversation.id) state.conversation = new conversations.Conversation();
      state.list = await conversations.list();
    }),
    restore: told(async () => {
      const {deleted} = state;
      state.deleted = null;
      await conversations.restore(deleted);
      if (!state.conversation.messages.size) state.conversation = deleted;
      state.list = await conversations.list();
    }),
    exportAll: told(async () => download(`pypcd-${new Date().toISOString().slice(0, 10)}.json`, await conversations.exported())),
    importAll: told(async file => {
      try {
        const n = await conversations.imported(await file.text());
        state.imported = n;
        state.said = `${n} conversations imported.`;
      } catch (error) {
        throw new Error(`${file.name} was not imported: ${error.message}.`);
      }
      state.list = await conversations.list();
    }),
  };
}

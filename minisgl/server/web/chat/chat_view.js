/**
 * The view Chat: conversations on the left, the chosen one's messages, and the field to write in.
 *
 * Keys: Enter sends, Shift+Enter breaks the line, Escape stops an answer, Ctrl+Shift+O begins a conversation.
 */

import { checkConnection } from "../shared/connection.js";
import { announce, h, iconButton, saveFile } from "../shared/dom.js";
import { getJson } from "../shared/server.js";
import * as tree from "./conversation.js";
import { MessageView } from "./message_view.js";
import { requestBody, streamReply } from "./reply.js";
import { editSettings, storedSettings } from "./settings.js";
import * as storage from "./storage.js";

const SAVE_EVERY_MS = 2000;
const NEAR_END_PX = 80;

export class ChatView {
  constructor(root) {
    this._conversations = [];
    this._shown = null;
    this._views = new Map();
    this._writing = null;
    this._editing = null;
    this._build(root);
    this._load();
  }

  show() {
    this._input.focus({ preventScroll: true });
  }

  hide() {}

  _build(root) {
    this._list = h("ul.conversations");
    const file = h("input", { type: "file", accept: "application/json", hidden: true, onchange: () => this._import(file) });
    const side = h(
      "aside.side",
      { id: "side", "aria-label": "Conversations" },
      h("button.new", { type: "button", onclick: () => this._open(null) }, "New conversation"),
      this._list,
      h(
        "div.side-foot",
        {},
        h("button.text", { type: "button", onclick: () => this._export() }, "Export"),
        h("button.text", { type: "button", onclick: () => file.click() }, "Import"),
        file,
      ),
    );
    this._log = h("div.log", { role: "log", "aria-live": "off", "aria-label": "Messages", tabIndex: 0 });
    this._input = h("textarea", {
      id: "composer",
      rows: 1,
      placeholder: "Write a message",
      "aria-label": "Message",
      oninput: () => this._resize(),
      onkeydown: (event) => this._key(event),
    });
    this._send = iconButton("send", "Send", () => this._submit());
    this._send.classList.add("send");
    this._stop = iconButton("stop", "Stop", () => this._writing?.controller.abort(), { hidden: true });
    this._stop.classList.add("send");
    this._notice = h("p.notice", { hidden: true });
    const composer = h(
      "div.composer",
      {},
      this._notice,
      h(
        "div.box",
        {},
        iconButton("gear", "Settings of this conversation", () => this._settings()),
        this._input,
        this._send,
        this._stop,
      ),
      h("p.hint", {}, "Enter sends · Shift+Enter breaks the line · Esc stops"),
    );
    const menu = iconButton("menu", "Conversations", () => root.classList.toggle("with-side"), { "aria-controls": "side" });
    menu.classList.add("menu");
    root.append(side, h("div.chat-main", {}, menu, this._log, composer));
    this._root = root;
    document.addEventListener("keydown", (event) => {
      if (root.hidden) return;
      if (event.key === "Escape" && this._writing && !document.querySelector("dialog[open]")) this._writing.controller.abort();
      if (event.key === "O" && event.ctrlKey && event.shiftKey) {
        this._open(null);
        event.preventDefault();
      }
    });
  }

  async _load() {
    try {
      this._conversations = await storage.loadAll();
    } catch {
      this._say("This browser keeps no data here: conversations are gone with the tab.");
    }
    this._open(this._conversations[0] ?? null);
  }

  _say(text) {
    this._notice.textContent = text ?? "";
    this._notice.hidden = !text;
  }

  // Conversations

  _open(conversation) {
    this._writing?.controller.abort();
    this._shown = conversation ?? tree.newConversation(storedSettings());
    this._root.classList.remove("with-side");
    this._stopEditing();
    this._drawList();
    this._drawLog();
    this._toEnd();
    this._input.focus({ preventScroll: true });
  }

  _drawList() {
    const items = this._conversations.map((one) => {
      const open = h("button.open", { type: "button", onclick: () => this._open(one) }, one.title || "Without words");
      if (one === this._shown) open.setAttribute("aria-current", "true");
      return h("li", {}, open, iconButton("trash", `Delete “${one.title}”`, () => this._delete(one)));
    });
    this._list.replaceChildren(...items);
  }

  _delete(conversation) {
    if (!confirm(`Delete “${conversation.title}”? This can't be undone.`)) return;
    this._conversations = this._conversations.filter((one) => one !== conversation);
    storage.remove(conversation.id).catch((error) => this._say(`Not deleted: ${error.message}`));
    if (conversation === this._shown) this._open(this._conversations[0] ?? null);
    else this._drawList();
  }

  _export() {
    saveFile(`minisgl-conversations-${new Date().toISOString().slice(0, 10)}.json`, tree.exported(this._conversations));
  }

  async _import(file) {
    try {
      const added = tree.imported(await file.files[0].text());
      for (const conversation of added) await storage.save(conversation);
      this._conversations.unshift(...added);
      this._open(added[0] ?? this._shown);
      this._say(`${added.length} conversations were imported.`);
    } catch (error) {
      this._say(`Not imported: ${error.message}.`);
    }
    file.value = "";
  }

  _save(conversation = this._shown) {
    if (!this._conversations.includes(conversation)) {
      this._conversations.unshift(conversation);
      this._drawList();
    }
    return storage.save(conversation).catch((error) => this._say(`Not kept in this browser: ${error.message}`));
  }

  _settings() {
    const conversation = this._shown;
    editSettings(conversation.settings, (settings) => {
      conversation.settings = settings;
      if (this._conversations.includes(conversation)) this._save(conversation);
    });
  }

  // Messages

  _drawLog() {
    const path = tree.shownPath(this._shown);
    const views = new Map();
    for (const message of path) {
      const all = tree.siblings(this._shown, message.parent);
      views.set(message.id, new MessageView(message, this._actions(), { place: all.indexOf(message.id), count: all.length }));
    }
    this._views = views;
    if (path.length) this._log.replaceChildren(...[...views.values()].map((view) => view.element));
    else this._log.replaceChildren(h("div.empty", {}, h("h2", {}, "What shall we talk about?"), h("p", {}, "Nothing you write here goes anywhere but to this server.")));
  }

  _actions() {
    return {
      edit: (message) => this._edit(message),
      regenerate: (message) => this._answer(this._shown.messages[message.parent]),
      sibling: (message, by) => {
        if (this._writing) return;
        tree.showSibling(this._shown, message, by);
        this._save();
        this._drawLog();
      },
      answerCalls: (message, results) => {
        let last = message;
        message.answered = true;
        message.calls.forEach((call, place) => {
          last = tree.addMessage(this._shown, last.id, { role: "tool", content: results[place], call_id: call.id });
        });
        this._answer(last);
      },
    };
  }

  _key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this._submit();
    } else if (event.key === "Escape" && this._editing) this._stopEditing();
  }

  _edit(message) {
    this._editing = message;
    this._input.value = message.content;
    this._say("Editing: what you send becomes another version of this message. Esc leaves it.");
    this._resize();
    this._input.focus();
  }

  _stopEditing() {
    if (this._editing) this._input.value = "";
    this._editing = null;
    this._say(null);
    this._resize();
  }

  _submit() {
    const text = this._input.value.trim();
    if (!text || this._writing) return;
    const parent = this._editing ? this._editing.parent : (tree.shownPath(this._shown).at(-1)?.id ?? null);
    const message = tree.addMessage(this._shown, parent, { role: "user", content: text });
    this._editing = null;
    this._say(null);
    this._input.value = "";
    this._resize();
    this._answer(message);
  }

  /** Have the model answer the conversation that ends with `last`. */
  async _answer(last) {
    if (this._writing) return;
    const conversation = this._shown;
    const controller = new AbortController();
    const message = tree.addMessage(conversation, last.id, { role: "assistant" });
    this._writing = { controller };
    this._setWriting(true);
    this._save(conversation);
    this._drawLog();
    this._toEnd();
    let savedAt = performance.now();
    const view = this._views.get(message.id);
    const onChange = () => {
      if (this._shown !== conversation) return;
      const follows = this._isAtEnd();
      view.grow();
      if (follows) requestAnimationFrame(() => this._toEnd());
      if (performance.now() - savedAt > SAVE_EVERY_MS) {
        savedAt = performance.now();
        this._save(conversation);
      }
    };
    view.element.classList.add("writing");
    try {
      this._model ??= (await getJson("v1/models", controller.signal)).data[0].id;
      await streamReply(requestBody(conversation, last, this._model), message, onChange, controller.signal);
    } catch (error) {
      message.stopped = error.name === "AbortError";
      if (!message.stopped) message.error = error.message;
    }
    if (message.error) checkConnection();
    this._writing = null;
    this._setWriting(false);
    conversation.changed = Date.now();
    await this._save(conversation);
    if (this._shown !== conversation) return;
    const follows = this._isAtEnd();
    view.finish();
    if (follows) this._toEnd();
    announce(message.error ? `The answer failed: ${message.error}` : "The answer is complete.");
  }

  _setWriting(isWriting) {
    this._send.hidden = isWriting;
    this._stop.hidden = !isWriting;
    this._log.setAttribute("aria-busy", String(isWriting));
  }

  _isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this._log;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  _toEnd() {
    this._log.scrollTop = this._log.scrollHeight;
  }

  _resize() {
    this._input.style.height = "auto";
    this._input.style.height = `${Math.min(this._input.scrollHeight, 240)}px`;
  }
}

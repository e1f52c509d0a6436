/**
 * A conversation is a tree of messages: an edited question or another answer is a sibling, and nothing is lost.
 * One path from the root is shown. No DOM, no storage, no network.
 *
 * A message: {id, parent, role: user|assistant|tool, content, at, ...}. An assistant's may also have thought,
 * calls: [{id, name, arguments}], logprobs, stats, error, stopped; a tool's has call_id.
 */

let lastId = 0;

function newId() {
  lastId = Math.max(lastId + 1, Date.now());
  return lastId.toString(36);
}

/** An empty conversation. `settings`: see settings.js. */
export function newConversation(settings) {
  return { id: newId(), title: "", changed: Date.now(), settings: { ...settings }, messages: {}, chosen: {} };
}

/** Add a message below `parent` (null = a first one) and show it. Returns the message. */
export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent, at: Date.now(), content: "", ...fields };
  conversation.messages[message.id] = message;
  conversation.chosen[parent ?? ""] = message.id;
  conversation.changed = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content);
  return message;
}

/** The first words of a text, on one line. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** The ids of all messages below `parent`, the oldest first. */
export function siblings(conversation, parent) {
  return Object.values(conversation.messages)
    .filter((message) => message.parent === parent)
    .map((message) => message.id);
}

/** The messages that are shown, from the first to the last. */
export function shownPath(conversation) {
  const path = [];
  for (let id = conversation.chosen[""]; id; id = conversation.chosen[id]) path.push(conversation.messages[id]);
  return path;
}

/** Show the sibling that stands `by` places from this message. */
export function showSibling(conversation, message, by) {
  const all = siblings(conversation, message.parent);
  const place = all.indexOf(message.id) + by;
  if (place >= 0 && place < all.length) conversation.chosen[message.parent ?? ""] = all[place];
}

/** The conversation up to and with `last`, as the API takes it. Thoughts are not sent back. */
export function apiMessages(conversation, last) {
  const path = [];
  for (let id = last?.id; id; id = conversation.messages[id].parent) path.unshift(conversation.messages[id]);
  const messages = path.filter((message) => !message.error || message.content).map(apiMessage);
  const system = conversation.settings.system.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function apiMessage({ role, content, calls, call_id }) {
  if (role === "tool") return { role, content, tool_call_id: call_id };
  if (!calls?.length) return { role, content };
  const tool_calls = calls.map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  return { role, content: content || null, tool_calls };
}

/**
 * Conversations as a file's text.
 *
 * @param {Object[]} conversations
 */
export function exported(conversations) {
  return JSON.stringify({ format: "minisgl-conversations", version: 1, conversations }, null, 1);
}

/**
 * The conversations of a file that `exported` made, with ids of their own.
 *
 * @throws {Error} the text is not such a file; the message says what is wrong
 */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON");
  }
  if (file?.format !== "minisgl-conversations") throw new Error("this file holds no conversations of minisgl");
  if (file.version !== 1) throw new Error(`this file has version ${file.version}; this page reads version 1`);
  return file.conversations.map((one) => {
    if (typeof one.title !== "string" || typeof one.messages !== "object" || typeof one.chosen !== "object")
      throw new Error("a conversation in this file is not complete");
    for (const message of Object.values(one.messages))
      if (typeof message.content !== "string" || !["user", "assistant", "tool"].includes(message.role))
        throw new Error("a message in this file has no text or an unknown role");
    return { ...one, id: newId() };
  });
}

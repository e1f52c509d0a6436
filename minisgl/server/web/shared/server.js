/**
 * Calls to the server this page came from: the key, errors, event streams, and whether it answers at all.
 *
 * The key is asked for once, kept in this browser, and asked for again when the server refuses it.
 */

const KEY = "minisgl.key";
let asking = null;

/** An answer with an error status, or a network failure (status 0). */
export class ServerError extends Error {
  constructor(status, code, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Call `path` (without a leading slash, so that a proxy may serve the page below a path of its own).
 *
 * @param {string} path
 * @param {{method?: string, body?: *, signal?: AbortSignal}} options `body` is sent as JSON
 * @returns {Promise<Response>} with a status of success
 * @throws {ServerError} any other status; the server can't be reached. AbortError: `signal`
 */
export async function call(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = localStorage.getItem(KEY);
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "unreachable", "the server can't be reached");
    }
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    // Another call may have been given a new key while this one was under way.
    if (localStorage.getItem(KEY) === key) await askForKey(key !== null);
  }
}

/** The JSON that GET `path` answers. */
export async function getJson(path, signal) {
  return (await call(path, { signal })).json();
}

/** Ask for another key, because the one in use may not do what is wanted. Rejects if none is given. */
export function changeKey() {
  return askForKey(true);
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not ours: a proxy's page.
  }
  const after = Number(response.headers.get("Retry-After"));
  const text = error.message ?? `the server answered ${response.status} ${response.statusText}`;
  return new ServerError(response.status, error.code ?? null, text, after > 0 ? after : null);
}

function askForKey(wasRefused) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    if (wasRefused) {
      document.getElementById("key-title").textContent = "The server refused the key";
      document.getElementById("key-reason").textContent = "It may have expired, or may not do this. Give another one.";
    }
    input.value = "";
    dialog.returnValue = "";
    const done = () => {
      asking = null;
      if (dialog.returnValue !== "ok") return reject(new ServerError(401, "no_key", "the server needs a key"));
      localStorage.setItem(KEY, input.value.trim());
      resolve();
    };
    dialog.addEventListener("close", done, { once: true });
    dialog.showModal();
  });
  return asking;
}

/**
 * The data of each server-sent event of a response, as text. Comments are passed over.
 *
 * @param {Response} response
 * @yields {string}
 * @throws {ServerError} the connection broke
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError(0, "broken", "the connection to the server broke");
      }
      if (part.done) return;
      const blocks = (rest + part.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Resolve after `ms`, or when the page is shown again, if that is earlier. */
export function pause(ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
      resolve();
    };
    const seen = () => !document.hidden && done();
    const timer = setTimeout(done, ms);
    document.addEventListener("visibilitychange", seen);
  });
}

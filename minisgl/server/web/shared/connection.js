/**
 * Watches whether the server answers, and tells whoever asked to know.
 *
 * A ready server is asked every 15 seconds, and only while the page is shown. One that does not answer is asked
 * every second.
 */

import { pause } from "./server.js";

const listeners = new Set();
let state = { kind: "connecting", text: "connecting" };
let wake = () => {};

/** Call `listener` with the state now and on each change: {kind: connecting|ready|loading|away, text}. */
export function onConnection(listener) {
  listeners.add(listener);
  listener(state);
  return () => listeners.delete(listener);
}

/** Look now: a call has just failed. */
export function checkConnection() {
  wake();
}

/** Watch for ever. */
export async function watchConnection() {
  for (;;) {
    const next = await ask();
    if (next.kind !== state.kind || next.text !== state.text) {
      state = next;
      for (const listener of listeners) listener(state);
    }
    await Promise.race([
      pause(state.kind === "ready" ? 15000 : 1000),
      new Promise((resolve) => (wake = resolve)),
    ]);
    while (document.hidden) await pause(3600 * 1000);
  }
}

async function ask() {
  try {
    const response = await fetch("health", { signal: AbortSignal.timeout(5000) });
    if (response.ok) return { kind: "ready", text: "ready" };
    const answer = await response.json().catch(() => ({}));
    return { kind: "loading", text: answer.reason ?? "starting" };
  } catch {
    return { kind: "away", text: "not reachable, trying again" };
  }
}

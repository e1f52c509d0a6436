/** A line that says what does not work, with a way to give another key where that helps. */

import { h } from "./dom.js";
import { changeKey } from "./server.js";

export class Problem {
  /** @param {function(): void} onKey a new key was given */
  constructor(onKey) {
    this._onKey = onKey;
    this.element = h("p.problem", { role: "alert", hidden: true });
  }

  /** Show an error, or null for none. `what` says what is missing. */
  show(error, what) {
    this.element.hidden = !error;
    const text = error ? `${what}: ${error.message}. ` : "";
    if (this.element.dataset.text === text) return;
    this.element.dataset.text = text;
    this.element.replaceChildren(text);
    if (error?.status === 403) this.element.append(h("button", { type: "button", onclick: () => this._change() }, "Use another key"));
  }

  async _change() {
    try {
      await changeKey();
      this._onKey();
    } catch {
      // No key was given; the line stays.
    }
  }
}

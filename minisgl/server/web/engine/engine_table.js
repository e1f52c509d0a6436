/** The engines of a server that has several: a row for each, to choose it by, and what adds up over them. */

import { h } from "../shared/dom.js";
import { count, duration, rate } from "../shared/format.js";
import { newest } from "./charts.js";

/** [head, field of the sample, format, whether it adds up] */
const COLUMNS = [
  ["Output, tok/s", "output_tokens_per_s", rate, true],
  ["Prompt, tok/s", "prompt_tokens_per_s", rate, true],
  ["Running", "running", count, true],
  ["Waiting", "waiting", count, true],
  ["Pages free", "pages_free", count, true],
  ["Step, p50", "step_p50_ms", duration, false],
];

/** A table that is hidden while there is one engine. `onPick` is called with the id of a chosen engine. */
export class EngineTable {
  constructor(onPick) {
    this._onPick = onPick;
    this._rows = new Map();
    this._body = h("tbody");
    this._sums = COLUMNS.map(() => h("td.number"));
    const heads = ["Engine", "State", ...COLUMNS.map(([head]) => head)];
    this.element = h(
      "section.engines.card",
      { "aria-label": "Engines", tabIndex: 0, hidden: true },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...heads.map((text) => h("th", { scope: "col" }, text)))),
        this._body,
        h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "All"), h("td"), ...this._sums)),
      ),
    );
  }

  /** Show the engines: a map from id to {state, columns}. `chosen` is the id of the one whose charts are shown. */
  draw(engines, chosen) {
    this.element.hidden = engines.size < 2;
    const ids = [...engines.keys()];
    // Rows stay the same elements from second to second, so that a button keeps the focus.
    if (ids.join() !== [...this._rows.keys()].join()) {
      this._rows = new Map(ids.map((id) => [id, this._row(id)]));
      this._body.replaceChildren(...[...this._rows.values()].map(({ element }) => element));
    }
    const values = ids.map((id) => COLUMNS.map(([, name]) => newest(engines.get(id).columns[name] ?? [])));
    ids.forEach((id, place) => {
      const { element, button, state, cells } = this._rows.get(id);
      element.classList.toggle("chosen", id === chosen);
      button.setAttribute("aria-pressed", String(id === chosen));
      state.textContent = engines.get(id).state;
      state.className = `end ${engines.get(id).state === "serving" ? "open" : "abort"}`;
      cells.forEach((cell, column) => (cell.textContent = COLUMNS[column][2](values[place][column])));
    });
    COLUMNS.forEach(([, , format, addsUp], column) => {
      const known = values.map((row) => row[column]).filter((value) => value !== null);
      this._sums[column].textContent = addsUp && known.length ? format(known.reduce((sum, value) => sum + value)) : "";
    });
  }

  _row(id) {
    const button = h("button", { type: "button", onclick: () => this._onPick(id) }, `Engine ${id}`);
    const state = h("span.end");
    const cells = COLUMNS.map(() => h("td.number"));
    return { element: h("tr", {}, h("th", { scope: "row" }, button), h("td", {}, state), ...cells), button, state, cells };
  }
}

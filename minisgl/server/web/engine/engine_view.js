/** The view Engine: what it does this second, the last ten minutes, and what it runs with and why. */

import { count, duration, percent, rate } from "../shared/format.js";
import { h } from "../shared/dom.js";
import { Problem } from "../shared/problem.js";
import { getJson } from "../shared/server.js";
import { Watch } from "../shared/watch.js";
import { Chart, newest } from "./charts.js";
import { EngineTable } from "./engine_table.js";

const CHARTS = [
  {
    title: "Tokens per second",
    format: rate,
    series: [
      ["output_tokens_per_s", "output", "--c1"],
      ["prompt_tokens_per_s", "prompt", "--c2"],
    ],
  },
  {
    title: "Requests",
    format: count,
    series: [
      ["running", "running", "--c1"],
      ["waiting", "waiting", "--c3"],
    ],
  },
  {
    title: "Pages of the cache",
    stacked: true,
    format: count,
    series: [
      ["pages_running", "running", "--c1"],
      ["pages_cached", "cached", "--c2"],
      ["pages_free", "free", "--c0"],
    ],
  },
  {
    title: "Prompt tokens found in the cache",
    sparse: true,
    format: percent,
    max: 1,
    series: [["hit_rate", "hit rate", "--c2"]],
  },
  {
    title: "Time to the first token",
    sparse: true,
    format: duration,
    series: [
      ["first_token_p50_ms", "p50", "--c1"],
      ["first_token_p99_ms", "p99", "--c3"],
    ],
  },
  {
    title: "Time between tokens",
    format: duration,
    series: [
      ["token_p50_ms", "p50", "--c1"],
      ["token_p99_ms", "p99", "--c3"],
    ],
  },
  {
    title: "A step",
    hint: "mean, by what the host does",
    stacked: true,
    format: duration,
    series: [
      ["plan_ms", "plan", "--c2"],
      ["launch_ms", "launch", "--c4"],
      ["masks_ms", "masks", "--c5"],
      ["wait_ms", "waits for the device", "--c1"],
      ["apply_ms", "apply", "--c3"],
      ["other_ms", "other", "--c0"],
    ],
  },
  {
    title: "Steps out of the ordinary",
    hint: "per second",
    format: count,
    series: [
      ["graph_misses", "graph misses", "--c3"],
      ["recompiles", "recompiles", "--c5"],
      ["preemptions", "preemptions", "--c4"],
    ],
  },
];
const TILES = [
  ["Output", "output_tokens_per_s", (value) => `${rate(value)} tok/s`],
  ["Running", "running", count],
  ["Waiting", "waiting", count],
  ["First token, p50", "first_token_p50_ms", duration],
  ["Between tokens, p50", "token_p50_ms", duration],
  ["Step, p50", "step_p50_ms", duration],
];

export class EngineView {
  constructor(root) {
    this._watch = new Watch(() => this._draw());
    this._id = null;
    this._tiles = TILES.map(() => h("dd"));
    this._charts = CHARTS.map((what) => new Chart(what));
    this._engines = new EngineTable((id) => {
      this._id = id;
      this._draw();
      this._loadFacts();
    });
    this._problem = new Problem(() => {
      this.hide();
      this.show();
    });
    this._facts = h("section.facts", { "aria-label": "What the engine runs with" });
    root.append(
      h(
        "div.page",
        {},
        this._engines.element,
        this._problem.element,
        h("dl.tiles", {}, ...TILES.map(([label], place) => h("div.tile", {}, h("dt", {}, label), this._tiles[place]))),
        h("div.charts", {}, ...this._charts.map((chart) => chart.element)),
        this._facts,
      ),
    );
    addEventListener("themechange", () => this._redraw());
    new ResizeObserver(() => this._draw()).observe(root);
  }

  show() {
    this._watch.start();
    this._loadFacts();
  }

  hide() {
    this._watch.stop();
  }

  _redraw() {
    for (const chart of this._charts) chart.forget();
    this._draw();
  }

  _draw() {
    this._problem.show(this._watch.problem, "No figures");
    const ids = [...this._watch.engines.keys()];
    if (!ids.length) return;
    if (!ids.includes(this._id)) this._id = ids[0];
    this._engines.draw(this._watch.engines, this._id);
    const { columns } = this._watch.engines.get(this._id);
    if (!columns.time.length) return;
    TILES.forEach(([, name, format], place) => {
      this._tiles[place].textContent = format(newest(columns[name]));
    });
    for (const chart of this._charts) chart.draw(columns);
  }

  async _loadFacts() {
    let answer;
    try {
      answer = await getJson("debug/engines");
    } catch {
      return; // the figures, which come the same way, say why
    }
    const engine = answer.engines.find(({ id }) => id === this._id) ?? answer.engines[0];
    const rows = engine.choices.map(({ flag, value, why }) =>
      h("tr", {}, h("th", { scope: "row" }, h("code", {}, flag)), h("td", {}, value), h("td", {}, why)),
    );
    const stages = Object.entries(engine.startup_ms);
    const longest = Math.max(...stages.map(([, ms]) => ms), 1);
    const bars = stages.map(([name, ms]) => {
      const bar = h("i.bar");
      bar.style.width = `${Math.max(0.5, (100 * ms) / longest)}%`;
      return h("tr", {}, h("th", { scope: "row" }, name), h("td.number", {}, duration(ms)), h("td.track", {}, bar));
    });
    this._facts.replaceChildren(
      h("h2", {}, "What it runs with, and why"),
      h("p.faint", {}, `${answer.model} on ${engine.device ?? "a device that is not known yet"}; minisgl ${answer.version}, process ${engine.pid}`),
      h("div.wide", { tabIndex: 0, role: "region", "aria-label": "Settings" }, h("table", {}, h("tbody", {}, ...rows))),
      h("h2", {}, "Its start"),
      h("div.wide", { tabIndex: 0, role: "region", "aria-label": "Start" }, h("table", {}, h("tbody", {}, ...bars))),
    );
  }
}

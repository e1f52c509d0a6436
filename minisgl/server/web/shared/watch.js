/**
 * The server's figures, second by second: ten minutes of them at first, then each new one as it comes.
 *
 * One stream of events serves all views. It is open only while a view that needs it is shown.
 */

import { call, events, getJson, pause } from "./server.js";

const SECONDS = 600;

/** Figures of one server. `start` begins, `stop` ends; `onChange` is called after each change. */
export class Watch {
  constructor(onChange) {
    this._onChange = onChange;
    this._controller = null;
    this.engines = new Map();
    /** Engine id -> {state, columns}. */
    this.moments = new Map();
    /** "engine/number" or "refused/number" -> a moment. */
    /** Why there are no new figures: an Error; null = there are. */
    this.problem = null;
  }

  start() {
    if (this._controller) return;
    this._controller = new AbortController();
    this._run(this._controller.signal);
  }

  stop() {
    this._controller?.abort();
    this._controller = null;
  }

  async _run(signal) {
    while (!signal.aborted) {
      try {
        await this._load(signal);
        const response = await call("debug/events", { signal });
        for await (const data of events(response)) {
          if (document.hidden) continue;
          this._take(JSON.parse(data));
          this._onChange();
        }
        this.problem = new Error("the stream of figures ended");
      } catch (error) {
        if (signal.aborted) return;
        this.problem = error;
      }
      this._onChange();
      await pause(this.problem.status === 403 ? 10000 : 2000);
    }
  }

  async _load(signal) {
    const [history, moments] = await Promise.all([
      getJson(`debug/history?seconds=${SECONDS}`, signal),
      getJson("debug/moments", signal),
    ]);
    this.engines = new Map(history.engines.map(({ id, state, columns }) => [id, { state, columns }]));
    this.moments = new Map();
    for (const engine of moments.engines) this._keep(engine.id, engine.moments);
    this._keep("refused", moments.refused);
    this.problem = null;
    this._onChange();
  }

  _take(event) {
    for (const { id, state, sample, moments } of event.engines) {
      const engine = this.engines.get(id) ?? { state, columns: { time: [] } };
      engine.state = state;
      this.engines.set(id, engine);
      if (sample && sample.time !== engine.columns.time.at(-1)) addSample(engine.columns, sample);
      this._keep(id, moments);
    }
    this._keep("refused", event.refused);
    this.problem = null;
  }

  _keep(source, moments) {
    for (const moment of moments) this.moments.set(`${source}/${moment.number}`, moment);
    const all = [...this.moments].sort(([, one], [, other]) => other.until - one.until);
    this.moments = new Map(all.slice(0, 200));
  }
}

function addSample(columns, sample) {
  for (const [name, value] of Object.entries(sample)) {
    columns[name] ??= columns.time.map(() => null);
    columns[name].push(value);
    if (columns[name].length > SECONDS) columns[name].shift();
  }
}

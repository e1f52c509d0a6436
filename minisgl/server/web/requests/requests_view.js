/** The view Requests: the last 1,000 of them, why each waited, and when the server was slow. */

import { announce, fill, h } from "../shared/dom.js";
import { count, duration, plural, timeOfDay } from "../shared/format.js";
import { Problem } from "../shared/problem.js";
import { call, getJson, pause } from "../shared/server.js";
import { Watch } from "../shared/watch.js";
import { lifeBar, lifeLegend, phaseText } from "./life_bar.js";

const MOST = 1000;
const PAGE = 100;
const EVERY_MS = 1000;
/** A request that ended up to this long before the last answer is asked for again: clocks differ. */
const OVERLAP_S = 2;
const FILTERS = {
  all: () => true,
  open: (life) => life.state !== "ended",
  waiting: (life) => ["restart", "grammar", "queued", "preempted"].includes(life.state),
  failed: (life) => life.end === "error" || life.end === "abort",
};

export class RequestsView {
  constructor(root) {
    this._lives = new Map();
    this._rows = new Map();
    this._filter = "all";
    this._most = PAGE;
    this._chosen = "";
    this._several = false;
    this._controller = null;
    this._watch = new Watch(() => this._drawMoments());
    this._build(root);
  }

  show(chosen) {
    this._chosen = chosen;
    if (!this._controller) {
      this._controller = new AbortController();
      this._run(this._controller.signal);
      this._watch.start();
    }
    this._draw();
  }

  hide() {
    this._controller?.abort();
    this._controller = null;
    this._watch.stop();
  }

  _build(root) {
    this._problem = new Problem(() => {
      this.hide();
      this.show(this._chosen);
    });
    this._count = h("span.faint");
    this._body = h("tbody");
    this._details = h("aside.details", { "aria-label": "The chosen request", hidden: true });
    this._moments = h("ul.moments");
    this._more = h("button", { type: "button", hidden: true, onclick: () => this._showMore() }, "Show more");
    this._filters = h(
      "div.choice",
      { role: "group", "aria-label": "Which requests" },
      ...Object.keys(FILTERS).map((name) =>
        h("button", { type: "button", "aria-pressed": String(name === "all"), "data-filter": name, onclick: () => this._setFilter(name) }, name),
      ),
    );
    const heads = ["Arrived", "Request", "Engine", "State", "Life", "Took", "First token", "Prompt", "Cached", "Output"];
    root.append(
      h(
        "div.page",
        {},
        this._problem.element,
        h("div.bar-row", {}, this._filters, this._count, lifeLegend()),
        h(
          "div.split",
          {},
          h(
            "div.wide.card",
            { tabIndex: 0, role: "region", "aria-label": "Requests" },
            (this._table = h("table.requests.one-engine", {}, h("thead", {}, h("tr", {}, ...heads.map((text) => h("th", { scope: "col" }, text)))), this._body)),
            this._more,
          ),
          this._details,
        ),
        h("section.card.slow", { "aria-label": "When the server was slow" }, h("h2", {}, "When the server was slow"), this._moments),
      ),
    );
  }

  async _run(signal) {
    let since = 0;
    while (!signal.aborted) {
      try {
        const answer = await getJson(`debug/requests?limit=${MOST}&ended_after=${since}`, signal);
        since = Math.max(0, answer.time - OVERLAP_S);
        this._take(answer);
        this._problem.show(null);
        this._draw();
      } catch (error) {
        if (signal.aborted) return;
        this._problem.show(error, "No requests");
        since = 0;
      }
      await pause(EVERY_MS);
      while (document.hidden && !signal.aborted) await pause(3600 * 1000);
    }
  }

  _take(answer) {
    this._several = answer.engines.length > 1;
    this._table.classList.toggle("one-engine", !this._several);
    for (const { id, requests } of answer.engines) {
      const told = new Set();
      for (const life of requests) {
        const key = `${id}.${life.number}`;
        told.add(key);
        this._lives.set(key, { ...life, key, engine: id });
      }
      // An open request that is not told of any more ended with its engine.
      for (const [key, life] of this._lives)
        if (life.engine === id && life.state !== "ended" && !told.has(key)) this._lives.delete(key);
    }
    const newest = [...this._lives.values()].sort((one, other) => other.arrived_at - one.arrived_at).slice(0, MOST);
    this._lives = new Map(newest.map((life) => [life.key, life]));
  }

  _setFilter(name) {
    this._filter = name;
    this._most = PAGE;
    for (const button of this._filters.children) button.setAttribute("aria-pressed", String(button.dataset.filter === name));
    this._draw();
  }

  _showMore() {
    this._most += PAGE;
    this._draw();
  }

  _draw() {
    const all = [...this._lives.values()].filter(FILTERS[this._filter]);
    const open = [...this._lives.values()].filter(FILTERS.open).length;
    this._count.textContent = `${plural(all.length, "request")}, ${count(open)} open`;
    this._more.hidden = all.length <= this._most;
    const rows = new Map();
    for (const life of all.slice(0, this._most)) {
      const known = this._rows.get(life.key);
      const text = `${life.total_ms} ${life.output_tokens} ${life.state}`;
      rows.set(life.key, known?.text === text ? known : { text, element: this._row(life) });
    }
    const elements = [...rows.values()].map(({ element }) => element);
    const shown = [...this._body.children];
    if (elements.length !== shown.length || elements.some((element, place) => element !== shown[place])) {
      const focused = document.activeElement?.closest?.("[data-key]")?.dataset.key;
      this._body.replaceChildren(...elements);
      if (focused) this._body.querySelector(`[data-key="${CSS.escape(focused)}"] a`)?.focus({ preventScroll: true });
    }
    this._rows = rows;
    for (const row of this._body.children) row.classList.toggle("chosen", row.dataset.key === this._chosen);
    this._drawDetails();
  }

  _row(life) {
    const name = life.id || `request ${life.number}`;
    return h(
      "tr",
      { "data-key": life.key, onclick: () => (location.hash = `#requests/${life.key}`) },
      h("td.number", {}, timeOfDay(1000 * life.arrived_at)),
      h("td", {}, h("a.id", { href: `#requests/${life.key}`, title: name }, name.length > 14 ? `${name.slice(0, 13)}…` : name)),
      h("td", {}, String(life.engine)),
      h("td", {}, life.state === "ended" ? h(`span.end.${life.end}`, {}, life.error_code || life.end) : h("span.end.open", {}, life.state)),
      h("td.life-cell", {}, lifeBar(life)),
      h("td.number", {}, duration(life.total_ms)),
      h("td.number", {}, duration(life.first_token_ms)),
      h("td.number", {}, count(life.prompt_tokens)),
      h("td.number", {}, count(life.cached_tokens)),
      h("td.number", {}, count(life.output_tokens)),
    );
  }

  _drawDetails() {
    const life = this._lives.get(this._chosen);
    this._details.hidden = !life;
    if (!life) return;
    const signature = `${life.key} ${life.total_ms} ${life.state}`;
    if (this._details.dataset.signature === signature) return;
    this._details.dataset.signature = signature;
    // The first says the most; parts of less than a millisecond explain nothing.
    const [first, ...others] = life.causes;
    const causes = others.filter(({ ms }) => ms >= 1).map(({ words, knobs }) => h("li", {}, ...withWholeFlags(words), knobsOf(knobs)));
    const abort = () => this._abort(life);
    fill(
      this._details,
      h("div.details-head", {}, h("h2", {}, life.id || `Request ${life.number}`), h("a.close", { href: "#requests", "aria-label": "Close" }, "×")),
      lifeBar(life),
      h("p.why", {}, ...withWholeFlags(first?.words ?? "Nothing held it up so far."), first && knobsOf(first.knobs)),
      causes.length > 0 && h("h3", {}, "Where else its time went"),
      causes.length > 0 && h("ul.causes", {}, ...causes),
      h("h3", {}, "Phase by phase"),
      h("ol.phases", {}, ...life.phases.map((phase) => h("li", {}, h(`i.${phase.kind}`), phaseText(phase, life.total_ms)))),
      h("p.faint", {}, this._figures(life)),
      life.client && h("p.problem", {}, `Its client reads slowly: ${count(life.client.unsent_bytes)} bytes are unsent.`),
      life.state !== "ended" && h("button.danger", { type: "button", onclick: abort }, "Abort this request"),
    );
  }

  _figures(life) {
    const parts = [...(this._several ? [`engine ${life.engine}`] : []), `priority ${life.priority}`];
    if (life.ahead !== null) parts.push(`${plural(life.ahead, "request")} ahead of it`);
    if (life.num_preemptions) parts.push(`preempted ${plural(life.num_preemptions, "time")}`);
    return parts.join(", ");
  }

  async _abort(life) {
    try {
      await call(`debug/requests/${encodeURIComponent(life.id || life.number)}/abort`, { method: "POST", body: {} });
      announce("The request was ended.");
    } catch (error) {
      this._problem.show(error, "Not aborted");
    }
  }

  _drawMoments() {
    const all = [...this._watch.moments].sort(([, one], [, other]) => other.until - one.until);
    const several = this._watch.engines.size > 1;
    const items = all.map(([key, { at, words, knobs }]) =>
      h("li", {}, h("time", {}, timeOfDay(1000 * at)), several && h("span.faint", {}, sourceOf(key)), h("span", {}, ...withWholeFlags(words)), knobsOf(knobs)),
    );
    this._moments.replaceChildren(...(items.length ? items : [h("li.faint", {}, "It was not, as far as it remembers.")]));
  }
}

/** Which engine a moment is of: "engine 1"; "server" for calls that were refused. */
function sourceOf(key) {
  const [source] = key.split("/");
  return source === "refused" ? "server" : `engine ${source}`;
}

/** The settings that help; false = there are none. */
function knobsOf(knobs) {
  return knobs.length > 0 && h("span.knobs", {}, ...knobs.map((knob) => h("code", {}, knob)));
}

/** A sentence in parts, so that no line breaks inside the name of a flag. */
function withWholeFlags(words) {
  return words.split(/(--[\w-]+)/).map((part) => (part.startsWith("--") ? h("span.flag", {}, part) : part));
}

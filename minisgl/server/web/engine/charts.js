/** A chart of the last ten minutes: lines, or areas that lie on each other. */

import uPlot from "../vendor/uplot.js";
import { h } from "../shared/dom.js";
import { count, timeOfDay } from "../shared/format.js";

const HEIGHT = 150;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6];
/** Steps between the labels of an axis that counts. */
const STALE = 5;
/** Seconds after which a value is no longer told as the newest. */

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * One chart in a frame with a title, a legend and the newest values.
 *
 * @param {{title: string, series: [string, string, string][], format: function(number): string,
 *   stacked?: boolean, sparse?: boolean, max?: number, hint?: string}} what
 *   `series`: (name of the sample's field, label, name of the CSS colour)
 */
export class Chart {
  constructor(what) {
    this._what = what;
    this._values = what.series.map(() => h("b"));
    this._place = h("div.plot");
    this._legend = h(
      "ul.legend-row",
      {},
      ...what.series.map(([, label, name], place) => {
        const mark = h("i");
        mark.style.background = `var(${name})`;
        return h("li", {}, mark, `${label} `, this._values[place]);
      }),
    );
    this.element = h(
      "figure.chart",
      {},
      h("figcaption", {}, what.title, what.hint && h("small", {}, ` ${what.hint}`)),
      this._legend,
      this._place,
    );
    this._plot = null;
  }

  /** Draw the columns of the history: a list of values for each field, and `time`. */
  draw(columns) {
    const { series, stacked, format } = this._what;
    const raw = series.map(([name]) => columns[name]);
    const shown = stacked ? piled(raw) : raw;
    raw.forEach((values, place) => {
      this._values[place].textContent = format(newest(values));
    });
    const texts = series.map(([, label], place) => `${label} ${this._values[place].textContent}`);
    this._place.setAttribute("role", "img");
    this._place.setAttribute("aria-label", `${this._what.title} now: ${texts.join(", ")}`);
    const width = this._place.clientWidth;
    if (!width) return;
    this._plot ??= this._make(width);
    if (this._plot.width !== width) this._plot.setSize({ width, height: HEIGHT });
    // The highest pile is drawn first, so that the lower ones cover their part of it.
    this._plot.setData([columns.time, ...(stacked ? shown.reverse() : shown)]);
  }

  /** Colours changed: make the plot anew at the next drawing. */
  forget() {
    this._plot?.destroy();
    this._plot = null;
  }

  _make(width) {
    const { series, stacked, sparse, format, max } = this._what;
    const lines = series.map(([, label, name]) => ({
      label,
      stroke: colour(name),
      width: stacked ? 0.5 : 1.6,
      fill: stacked ? colour(name) : undefined,
      // A figure that is measured now and then is a dot, and a line to the next one.
      points: { show: Boolean(sparse), size: 5, fill: colour(name) },
      spanGaps: Boolean(sparse),
    }));
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    return new uPlot(
      {
        width,
        height: HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        padding: [10, 30, 0, 0],
        scales: { y: { range: (_, low, high) => [0, max ?? Math.max(high * 1.1, 1e-3)] } },
        series: [{}, ...(stacked ? lines.reverse() : lines)],
        axes: [
          { ...axis, size: 28, space: 90, values: (_, ticks) => ticks.map((tick) => timeOfDay(1000 * tick)) },
          { ...axis, size: 62, space: 36, ...(format === count ? { incrs: WHOLE } : {}), values: (_, ticks) => ticks.map((tick) => (tick ? short(format(tick)) : "0")) },
        ],
      },
      [[], ...series.map(() => [])],
      this._place,
    );
  }
}

/** A label without decimals that are zero: "20 s" for "20.00 s". */
function short(label) {
  return label.replace(/\.0+(?!\d)/, "");
}

/** The newest known value of the last seconds; null = none is known. */
export function newest(values) {
  return values.slice(-STALE).findLast((value) => value !== null) ?? null;
}

/** Sums of each list and those before it; null where a value is unknown. */
function piled(lists) {
  const sums = [];
  for (const [place, values] of lists.entries())
    sums.push(values.map((value, at) => (value === null ? null : value + (place ? (sums[place - 1][at] ?? 0) : 0))));
  return sums;
}

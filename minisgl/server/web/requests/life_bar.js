/** A request's life as a bar: its phases from left to right, as long as they took. */

import { duration } from "../shared/format.js";
import { h } from "../shared/dom.js";

/** How each kind of phase is called. */
export const PHASES = {
  earlier: "in an engine that has ended",
  restart: "waits for the engine to be started again",
  server: "on its way to the engine",
  grammar: "its grammar compiles",
  queued: "waits for a row",
  prompt: "its prompt is computed",
  decoding: "decodes",
  preempted: "preempted, waits again",
  folded: "several phases",
};

/** What a phase is, how long it took, and why it waited. */
export function phaseText(phase, totalMs) {
  const took = duration((phase.end_ms ?? totalMs) - phase.begin_ms);
  const chunks = phase.chunks?.length > 1 ? ` in ${phase.chunks.length} chunks` : "";
  const waits = (phase.waits ?? []).map((wait) => `${duration(wait.ms)} ${WAITS[wait.reason] ?? wait.reason}`);
  return `${PHASES[phase.kind] ?? phase.kind}: ${took}${chunks}${waits.length ? ` (${waits.join(", ")})` : ""}`;
}

const WAITS = {
  step: "until the step ended",
  rows: "for a row",
  share: "for a row that is not kept for other users",
  pages: "for pages",
  budget: "for a share of the prompt tokens of a step",
  rules: "for the tables of logit rules",
  priority: "behind a higher priority",
};

/** The bar of a life. Its text says the same to a screen reader. */
export function lifeBar(life) {
  const total = Math.max(life.total_ms, 1e-3);
  const parts = life.phases.map((phase) => {
    const part = h(`i.${phase.kind}`);
    part.style.width = `${(100 * ((phase.end_ms ?? life.total_ms) - phase.begin_ms)) / total}%`;
    part.title = phaseText(phase, life.total_ms);
    return part;
  });
  const text = life.phases.map((phase) => phaseText(phase, life.total_ms)).join("; ");
  return h("span.life", { role: "img", "aria-label": text || "nothing yet" }, ...parts);
}

/** The colours of the phases. */
export function lifeLegend() {
  const shown = ["grammar", "queued", "prompt", "decoding", "preempted"];
  return h("ul.life-legend", {}, ...shown.map((kind) => h("li", {}, h(`i.${kind}`), PHASES[kind])));
}

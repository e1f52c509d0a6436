/** Shows an answer token by token: the likelier the model held a token, the fainter its colour. */

import { h } from "../shared/dom.js";

const STEPS = [0.9, 0.6, 0.3, 0.1];
/** Below each of these probabilities a token's colour is one step stronger. */

/** The class of a token's colour, from "p0" (almost certain) to "p4". */
export function shadeOf(logprob) {
  const probability = Math.exp(logprob);
  return `p${STEPS.filter((bound) => probability < bound).length}`;
}

/**
 * The tokens of an answer as spans; under the pointer or the keyboard's focus each shows its alternatives.
 *
 * @param {Array} tokens as reply.js keeps them: [text, log probability, alternatives]
 */
export function tokenView(tokens) {
  const card = h("div.alternatives", { role: "tooltip", hidden: true });
  const text = h("p.tokens", { tabIndex: 0, "aria-label": "Tokens; the arrow keys go from one to the next" });
  text.append(
    ...tokens.map(([token, logprob], place) => h(`span.${shadeOf(logprob)}`, { "data-place": place }, token)),
  );
  let at = -1;
  const show = (place) => {
    text.children[at]?.classList.remove("here");
    at = place;
    if (at < 0) return (card.hidden = true);
    text.children[at].classList.add("here");
    card.replaceChildren(alternatives(tokens[at]));
    card.hidden = false;
    const box = text.children[at].getBoundingClientRect();
    const frame = card.parentElement.getBoundingClientRect();
    card.style.top = `${box.bottom - frame.top + 6}px`;
    card.style.left = `${Math.max(0, Math.min(box.left - frame.left, frame.width - card.offsetWidth))}px`;
  };
  text.addEventListener("pointerover", (event) => show(Number(event.target.dataset.place ?? -1)));
  text.addEventListener("pointerleave", () => show(-1));
  text.addEventListener("blur", () => show(-1));
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) {
      show(Math.max(0, Math.min(tokens.length - 1, at + by)));
      event.preventDefault();
    } else if (event.key === "Escape") show(-1);
  });
  return h("div.logprobs", {}, text, card, legend());
}

function alternatives([token, logprob, others]) {
  const all = others.some(([text]) => text === token) ? others : [[token, logprob], ...others];
  const rows = all.map(([text, value]) => {
    const bar = h("i.bar");
    bar.style.width = `${Math.max(1, 100 * Math.exp(value))}%`;
    const share = (100 * Math.exp(value)).toFixed(1);
    return h(text === token ? "tr.chosen" : "tr", {}, h("th", {}, JSON.stringify(text)), h("td", {}, `${share} %`), h("td.track", {}, bar));
  });
  return h("table", {}, h("tbody", {}, ...rows));
}

function legend() {
  const names = ["over 90 %", "60 to 90 %", "30 to 60 %", "10 to 30 %", "under 10 %"];
  return h("p.legend", {}, ...names.map((name, step) => h(`span.p${step}`, {}, name)));
}

/**
 * One message on the page. While an answer streams, only what grew is drawn again, at most once a frame and at
 * most a quarter of the time.
 */

import { duration, percent, plural, rate } from "../shared/format.js";
import { h, icon, iconButton } from "../shared/dom.js";
import { tokenView } from "./logprobs.js";
import { copyButton, GrowingMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result of a call" };

/**
 * A message's element and what changes it.
 *
 * @param {Object} message
 * @param {Object} actions edit(message), regenerate(message), sibling(message, by), answerCalls(message, results)
 * @param {{place: number, count: number}} branch among its siblings
 */
export class MessageView {
  constructor(message, actions, branch) {
    this._message = message;
    this._actions = actions;
    this._frame = null;
    this._notBefore = 0;
    this._text = new GrowingMarkdown();
    this._thought = null;
    this._calls = h("div.calls");
    this._foot = h("div.foot");
    this._body = h("div.body");
    this.element = h(
      `article.message.${message.role}`,
      { "aria-label": NAMES[message.role] },
      h("h3.unseen", {}, NAMES[message.role]),
      this._body,
      this._calls,
      this._foot,
    );
    this._branch = branch;
    if (message.role === "assistant") this._body.append(this._text.element);
    this.finish();
  }

  /** The message grew. */
  grow() {
    this._frame ??= requestAnimationFrame((now) => {
      this._frame = null;
      if (now < this._notBefore) return this.grow();
      const started = performance.now();
      this._draw(false);
      this._notBefore = now + 3 * (performance.now() - started);
    });
  }

  /** The message is whole: draw it for good, with what one can do with it. */
  finish() {
    if (this._frame !== null) cancelAnimationFrame(this._frame);
    this._frame = null;
    this._draw(true);
    this._drawFoot();
  }

  _draw(isWhole) {
    const message = this._message;
    if (message.role !== "assistant") {
      this._body.replaceChildren(h("div.plain", {}, message.content));
      return;
    }
    if (message.thought) this._drawThought(isWhole);
    if (isWhole) this._text.finish(message.content);
    else this._text.show(message.content);
    this.element.classList.toggle("writing", !isWhole);
    if (message.calls) this._calls.replaceChildren(...message.calls.map((call) => callFrame(call)));
  }

  _drawThought(isWhole) {
    if (!this._thought) {
      this._thought = new GrowingMarkdown();
      this._summary = h("summary", {}, "Thinking …");
      this._body.prepend(h("details.thought", {}, this._summary, this._thought.element));
    }
    const { thought, content, stats } = this._message;
    const isOver = isWhole || content || this._message.calls;
    if (isOver) this._summary.textContent = stats?.thought ? `Thought (${plural(stats.thought, "token")})` : "Thought";
    if (isWhole) this._thought.finish(thought);
    else if (!content) this._thought.show(thought);
  }

  _drawFoot() {
    const message = this._message;
    const foot = [];
    if (message.error) foot.push(h("p.problem", { role: "alert" }, message.error));
    if (message.calls && !message.answered) foot.push(this._callForm());
    const buttons = h("div.buttons");
    if (this._branch.count > 1) buttons.append(this._branchButtons());
    if (message.role === "user")
      buttons.append(iconButton("edit", "Edit and send again", () => this._actions.edit(message)));
    if (message.role === "assistant")
      buttons.append(iconButton("retry", "Answer again", () => this._actions.regenerate(message)));
    buttons.append(copyButton("Copy the message", () => message.content));
    if (message.logprobs) buttons.append(this._colourButton());
    if (message.stats) buttons.append(statistics(message));
    foot.push(buttons);
    this._foot.replaceChildren(...foot);
  }

  _branchButtons() {
    const { place, count } = this._branch;
    const step = (sign, label, by, disabled) =>
      iconButton(sign, label, () => this._actions.sibling(this._message, by), { disabled });
    return h(
      "span.branches",
      {},
      step("left", "The version before", -1, place === 0),
      h("span", {}, `${place + 1} / ${count}`),
      step("right", "The next version", 1, place === count - 1),
    );
  }

  _colourButton() {
    let view = null;
    return iconButton(
      "colours",
      "Show how likely each token was",
      (event) => {
        const isOn = view === null;
        event.currentTarget.setAttribute("aria-pressed", String(isOn));
        this._text.element.hidden = isOn;
        if (isOn) this._body.append((view = tokenView(this._message.logprobs)));
        else {
          view.remove();
          view = null;
        }
      },
      { "aria-pressed": "false" },
    );
  }

  /** A form for the results of the model's calls. */
  _callForm() {
    const inputs = this._message.calls.map((call, place) =>
      h("input", { type: "text", name: `result-${place}`, placeholder: `Result of ${call.name}`, "aria-label": `Result of ${call.name}` }),
    );
    const send = (event) => {
      event.preventDefault();
      this._actions.answerCalls(this._message, inputs.map((input) => input.value));
    };
    return h("form.results", { onsubmit: send }, ...inputs, h("button", {}, "Send the results"));
  }
}

function callFrame({ name, arguments: text }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Still being written.
  }
  return h("figure.call", {}, h("figcaption", {}, icon("gear"), h("span", {}, name)), h("pre", {}, h("code", {}, shown)));
}

const ENDS = { length: "cut at the limit", content_filter: "filtered" };

function statistics({ stats, stopped, finish }) {
  const texts = [];
  if (stats.first_ms !== null) texts.push(h("span", {}, `first token after ${duration(stats.first_ms)}`));
  if (stats.tokens_per_s) texts.push(h("span", {}, `${rate(stats.tokens_per_s)} tokens/s`));
  if (stats.tokens !== null) texts.push(h("span", {}, plural(stats.tokens, "token")));
  if (stats.cached) texts.push(h("span", {}, `${percent(stats.cached / stats.prompt)} of ${plural(stats.prompt, "prompt token")} cached`));
  if (stopped) texts.push(h("span", {}, "stopped"));
  if (finish in ENDS) texts.push(h("span.warn", {}, ENDS[finish]));
  return h("span.stats", {}, ...texts);
}

/** What a conversation asks of the engine, and the form to change it. The last settings serve new conversations. */

import { h } from "../shared/dom.js";

const STORED = "minisgl.settings";

/** Settings of the first conversation; null = as the model's folder has it. */
export const DEFAULTS = {
  system: "",
  temperature: null,
  top_p: null,
  min_p: null,
  top_k: null,
  repetition_penalty: null,
  max_tokens: null,
  seed: null,
  thinking: "auto",
  logprobs: false,
  schema: "",
  tools: "",
  tool_choice: "auto",
};

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 = always the likeliest token"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "the likeliest tokens that together reach this share"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "at least this share of the likeliest token"],
  ["top_k", "Top k", { min: 1, max: 1000, step: 1 }, "the k likeliest tokens"],
  ["repetition_penalty", "Repetition penalty", { min: 0.5, max: 2, step: 0.05 }, "over 1 = fewer repetitions"],
  ["max_tokens", "Most tokens", { min: 1, max: 10000000, step: 1 }, "of one answer"],
  ["seed", "Seed", { min: 0, max: 2 ** 53 - 1, step: 1 }, "equal seeds, equal answers"],
];

/** The settings that new conversations begin with. */
export function storedSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORED) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/**
 * Let the user change `settings` in a dialog.
 *
 * @param {Object} settings
 * @param {function(Object): void} onSave gets the new ones
 */
export function editSettings(settings, onSave) {
  const form = h("form", { method: "dialog" });
  const fields = {};
  const field = (name, label, control, hint) => {
    fields[name] = control;
    control.id = `setting-${name}`;
    return h("div.field", {}, h("label", { for: control.id }, label), control, hint && h("small", {}, hint));
  };
  const number = ([name, label, bounds, hint]) =>
    field(name, label, h("input", { type: "number", ...bounds, value: settings[name] ?? "", placeholder: "model's own" }), hint);
  const choice = (name, label, options, hint) => {
    const control = h("select", {}, ...Object.entries(options).map(([value, text]) => h("option", { value }, text)));
    control.value = settings[name];
    return field(name, label, control, hint);
  };
  const area = (name, label, rows, hint, placeholder = "") =>
    field(name, label, h("textarea", { rows, placeholder, spellcheck: name === "system", value: settings[name] }), hint);
  const logprobs = h("input", { type: "checkbox", id: "setting-logprobs", checked: settings.logprobs });
  const problem = h("p.problem", { role: "alert" });
  form.append(
    h("h2", { id: "settings-title" }, "Settings of this conversation"),
    area("system", "System prompt", 3),
    h("div.grid", {}, ...NUMBERS.map(number)),
    choice("thinking", "Thinking", { auto: "as the model does", on: "on", off: "off" }, "where the model's template knows enable_thinking"),
    h("div.field.check", {}, logprobs, h("label", { for: "setting-logprobs" }, "Log probabilities: colours, and the alternatives to each token")),
    area("schema", "JSON schema", 4, "the answer is JSON that follows it", '{"type": "object", "properties": …}'),
    area("tools", "Tools", 4, "as OpenAI's API takes them; you give the calls' results by hand", '[{"type": "function", "function": {"name": …}}]'),
    choice("tool_choice", "Tool choice", { auto: "auto", required: "required", none: "none" }),
    problem,
    h(
      "div.actions",
      {},
      h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      h("button.primary", { value: "ok" }, "Save"),
    ),
  );
  const dialog = h("dialog.settings", { "aria-labelledby": "settings-title" }, form);
  form.addEventListener("submit", (event) => {
    const wrong = ["schema", "tools"].find((name) => !isJson(fields[name].value));
    if (wrong) {
      event.preventDefault();
      problem.textContent = wrong === "schema" ? "The JSON schema is not JSON." : "The list of tools is not JSON.";
      fields[wrong].focus();
      return;
    }
    const changed = { ...settings, logprobs: logprobs.checked };
    for (const [name] of NUMBERS) changed[name] = fields[name].value === "" ? null : fields[name].valueAsNumber;
    for (const name of ["system", "thinking", "schema", "tools", "tool_choice"]) changed[name] = fields[name].value;
    localStorage.setItem(STORED, JSON.stringify(changed));
    onSave(changed);
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function isJson(text) {
  if (!text.trim()) return true;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

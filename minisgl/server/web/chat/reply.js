/**
 * Asks the server for one answer and collects its stream into a message.
 *
 * Times are the browser's: from sending the request to the first and the last piece of the answer.
 */

import { call, events, ServerError } from "../shared/server.js";
import { apiMessages } from "./conversation.js";

const MAX_ALTERNATIVES = 5;

/**
 * The request's body.
 *
 * @throws {Error} the schema or the tools of the settings are not JSON
 */
export function requestBody(conversation, last, model) {
  const settings = conversation.settings;
  const body = {
    model,
    messages: apiMessages(conversation, last),
    stream: true,
    // A stopped answer has its figures, too.
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const name of ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed", "repetition_penalty"])
    if (settings[name] !== null) body[name] = settings[name];
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: MAX_ALTERNATIVES });
  if (settings.thinking !== "auto") body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.schema.trim()) {
    const schema = parsed(settings.schema, "the JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.tools.trim()) {
    body.tools = parsed(settings.tools, "the list of tools");
    if (settings.tool_choice !== "auto") body.tool_choice = settings.tool_choice;
  }
  return body;
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} in the settings is not JSON: ${error.message}`);
  }
}

/**
 * Stream an answer into `message` and call `onChange` for each event.
 *
 * Never throws: a failure stands in message.error, a stop by the user in message.stopped.
 *
 * @param {Object} body of POST v1/chat/completions
 * @param {Object} message the assistant's, still empty
 * @param {function(): void} onChange
 * @param {AbortSignal} signal stops the answer
 */
export async function streamReply(body, message, onChange, signal) {
  const started = performance.now();
  let first = null;
  let last = null;
  let usage = null;
  try {
    const response = await call("v1/chat/completions", { method: "POST", body, signal });
    message.request_id = response.headers.get("X-Request-Id");
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.status ?? 500, event.error.code, event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (addDelta(message, choice)) {
        last = performance.now();
        first ??= last;
      }
      if (choice.finish_reason) message.finish = choice.finish_reason;
      onChange();
    }
    if (!message.finish) throw new ServerError(0, "broken", "the connection ended before the answer did");
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  message.stats = statistics(usage, started, first, last);
  onChange();
}

/** Add a choice's delta to the message. Returns whether it brought anything to read. */
function addDelta(message, { delta, logprobs }) {
  const thought = delta.reasoning_content ?? "";
  if (thought) message.thought = (message.thought ?? "") + thought;
  if (delta.content) message.content += delta.content;
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    message.calls ??= [];
    message.calls[index] ??= { id, name: called.name, arguments: "" };
    message.calls[index].arguments += called.arguments ?? "";
  }
  if (logprobs?.content?.length) (message.logprobs ??= []).push(...logprobs.content.map(compact));
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}

/** [text, log probability, [[text, log probability], ...]]: a tenth of the space of what the server sends. */
function compact({ token, logprob, top_logprobs }) {
  return [token, logprob, top_logprobs.map((one) => [one.token, one.logprob])];
}

function statistics(usage, started, first, last) {
  const tokens = usage?.completion_tokens ?? null;
  return {
    first_ms: first === null ? null : first - started,
    whole_ms: performance.now() - started,
    tokens,
    tokens_per_s: tokens > 1 && last > first ? (1000 * (tokens - 1)) / (last - first) : null,
    prompt: usage?.prompt_tokens ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
    thought: usage?.completion_tokens_details?.reasoning_tokens ?? null,
  };
}

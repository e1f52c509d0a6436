// The openai package of npm: chat streamed and whole, completions, an error; tools and structured output by
// chat and responses, streams of each.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import assert from "node:assert";
import { z } from "zod";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const call = {
  model,
  messages: [{ role: "user", content: [{ type: "text", text: "Name three colours." }] }],
  temperature: 0,
  max_tokens: 24,
};

const whole = await client.chat.completions.create({ ...call, logprobs: true });
const text = whole.choices[0].message.content;
assert.ok(text.length > 0);
assert.equal(whole.choices[0].logprobs.content.length, whole.usage.completion_tokens);
console.log("ok: chat with logprobs");

let streamed = "";
let usage;
const stream = await client.chat.completions.create({
  ...call,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
console.log("ok: streamed chat is the whole one");

const runner = client.chat.completions.stream(call);
assert.equal(await runner.finalContent(), text);
console.log("ok: the stream helper");

const plain = await client.completions.create({ model, prompt: "One, two,", max_tokens: 8, n: 2, seed: 1 });
assert.equal(plain.choices.length, 2);
console.log("ok: completions, n = 2");

await assert.rejects(client.chat.completions.create({ ...call, top_p: 7 }), OpenAI.BadRequestError);
console.log("ok: errors");

const Wall = z.object({ colour: z.enum(["red", "blue"]), width: z.number().int().min(1).max(9) });
const paint = { name: "paint", description: "Paints a wall.", parameters: Wall };
const short = { ...call, max_tokens: 60 };

const made = await client.chat.completions.parse({ ...short, response_format: zodResponseFormat(Wall, "wall") });
const wall = Wall.parse(made.choices[0].message.parsed);
const making = client.chat.completions.stream({ ...short, response_format: zodResponseFormat(Wall, "wall") });
assert.deepEqual((await making.finalChatCompletion()).choices[0].message.parsed, wall);
console.log("ok: a zod type parsed, whole and streamed");

for (const tool_choice of ["required", { type: "function", function: { name: "paint" } }]) {
  const asked = { ...short, tools: [zodFunction(paint)], tool_choice, parallel_tool_calls: false };
  const called = (await client.chat.completions.parse(asked)).choices[0];
  assert.equal(called.finish_reason, "tool_calls");
  const [one] = called.message.tool_calls;
  Wall.parse(one.function.parsed_arguments);
  const calling = client.chat.completions.stream(asked);
  let written = "";
  calling.on("tool_calls.function.arguments.delta", (delta) => (written += delta.arguments_delta));
  const streamedCall = (await calling.finalChatCompletion()).choices[0].message.tool_calls[0];
  assert.equal(written, one.function.arguments);
  assert.deepEqual(streamedCall.function.parsed_arguments, one.function.parsed_arguments);
  const turns = [...call.messages, called.message, { role: "tool", tool_call_id: one.id, content: "done" }];
  await client.chat.completions.create({ ...asked, messages: turns, tool_choice: "none", max_tokens: 4 });
}
console.log("ok: required and named tools, whole, streamed and sent back");

const input = "Paint the wall.";
const ask = { model, input, temperature: 0, max_output_tokens: 60 };
const answer = await client.responses.parse({ ...ask, text: { format: zodTextFormat(Wall, "wall") } });
Wall.parse(answer.output_parsed);
const answering = client.responses.stream({ ...ask, text: { format: zodTextFormat(Wall, "wall") } });
assert.deepEqual((await answering.finalResponse()).output_parsed, answer.output_parsed);
console.log("ok: responses: a zod type parsed, whole and streamed");

const withTool = { ...ask, tools: [zodResponsesFunction(paint)], tool_choice: "required", parallel_tool_calls: false };
const response = await client.responses.parse(withTool);
const item = response.output.at(-1);
assert.equal(item.type, "function_call");
Wall.parse(item.parsed_arguments);
const events = [];
for await (const event of await client.responses.create({ ...withTool, stream: true })) events.push(event);
const done = events.find((event) => event.type === "response.function_call_arguments.done");
assert.equal(done.arguments, item.arguments);
assert.equal(events.at(-1).type, "response.completed");
const output = { type: "function_call_output", call_id: item.call_id, output: "done" };
const { id, call_id, type, name, arguments: written } = item;
const items = [{ role: "user", content: input }, { id, call_id, type, name, arguments: written }, output];
await client.responses.create({ ...withTool, input: items, tool_choice: "none", max_output_tokens: 4 });
console.log("ok: responses: a tool, whole, streamed and sent back");

// What the scripted engine says (script.py), as the model is too small to choose calls.
const scripted = new OpenAI({ baseURL: process.env.SCRIPTED_URL, apiKey: "none", maxRetries: 0 });
const calls = ["Rome", "Oslo"].map(
  (city) => `<tool_call>\n${JSON.stringify({ name: "weather", arguments: { city } })}\n</tool_call>`,
);
const script = `[[say]] Let me see.\n${calls.join("\n")} [[then]] It is sunny. [[end]]`;
for (const stream of [false, true]) {
  const cities = [];
  const weather = zodFunction({
    name: "weather",
    parameters: z.object({ city: z.string() }),
    function: ({ city }) => (cities.push(city), `${city}: sunny`),
  });
  const running = scripted.chat.completions.runTools({
    model: "tiny",
    messages: [{ role: "user", content: script }],
    tools: [weather],
    stream,
  });
  assert.equal(await running.finalContent(), "It is sunny.");
  assert.deepEqual(cities, ["Rome", "Oslo"]);
}
console.log("ok: runTools: two calls that the model chooses and their answers, whole and streamed");

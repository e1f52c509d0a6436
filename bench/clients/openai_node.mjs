// The openai package of npm: chat streamed and whole, completions, an error.
import OpenAI from "openai";
import assert from "node:assert";

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

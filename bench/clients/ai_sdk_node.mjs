// The AI SDK by four of its providers' models: objects, tools and their answers, whole and streamed.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";

const Wall = z.object({ colour: z.enum(["red", "blue"]), width: z.number().int().min(1).max(9) }).strict();
const wall = { colour: "red", width: 3 };
const paint = tool({ description: "Paints a wall.", inputSchema: Wall });
const makers = {
  compatible: (baseURL) =>
    createOpenAICompatible({ name: "minisgl", baseURL, supportsStructuredOutputs: true }).chatModel,
  chat: (baseURL) => createOpenAI({ baseURL, apiKey: "none" }).chat,
  responses: (baseURL) => createOpenAI({ baseURL, apiKey: "none" }).responses,
  messages: (baseURL) => createAnthropic({ baseURL, apiKey: "none" }),
};
const call = (name, input) => `\n<tool_call>\n${JSON.stringify({ name, arguments: input })}\n</tool_call>`;
const say = (...replies) => `[[say]] ${replies.join(" [[then]] ")} [[end]]`;

// Without it, the SDK sends references to stored answers.
const common = { maxRetries: 0, providerOptions: { openai: { store: false } } };

async function run(options, isStreamed) {
  if (!isStreamed) return generateText({ ...common, ...options });
  let error;
  const result = streamText({ ...common, ...options, onError: (event) => (error = event.error) });
  let parts = 0;
  for await (const part of result.fullStream) parts += part.type.endsWith("delta");
  if (error) throw error;
  assert.ok(parts > 2);
  const [text, reasoningText, steps, toolCalls, finishReason] = await Promise.all([
    result.text,
    result.reasoningText,
    result.steps,
    result.toolCalls,
    result.finishReason,
  ]);
  return { text, reasoningText, steps, toolCalls, finishReason, output: options.output && (await result.output) };
}

for (const [api, make] of Object.entries(makers)) {
  const model = make(process.env.BASE_URL)(process.env.MODEL);
  const ask = { model, prompt: "Paint the wall.", temperature: 0, maxOutputTokens: 100 };
  for (const isStreamed of [false, true]) {
    for (const toolChoice of ["required", { type: "tool", toolName: "paint" }]) {
      const { toolCalls, finishReason } = await run({ ...ask, tools: { paint }, toolChoice }, isStreamed);
      assert.equal(finishReason, "tool-calls");
      Wall.parse(toolCalls[0].input);
    }
    const { output } = await run({ ...ask, output: Output.object({ schema: Wall }) }, isStreamed);
    Wall.parse(output);
  }
  console.log(`ok: required and named tools, an object, whole and streamed, by ${api}`);

  const scripted = make(process.env.SCRIPTED_URL)("tiny");
  for (const isStreamed of [false, true]) {
    const cities = [];
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: ({ city }) => (cities.push(city), `${city}: sunny`),
    });
    const two = `<think>\nhm\n</think>\n\nLet me see.${call("weather", { city: "Rome" })}${call("weather", { city: "Oslo" })}`;
    const options = { model: scripted, maxOutputTokens: 2000, tools: { weather }, stopWhen: stepCountIs(4) };
    const { text, steps } = await run({ ...options, prompt: say(two, "It is sunny.") }, isStreamed);
    assert.equal(text, "It is sunny.");
    assert.equal(steps[0].text.trim(), "Let me see.");
    // OpenAI's provider reads no thoughts of chat completions, and of responses only their summary.
    assert.equal(steps[0].reasoningText?.trim() || "", ["compatible", "messages"].includes(api) ? "hm" : "");
    const last = await run(
      { ...options, prompt: say(two, JSON.stringify(wall)), output: Output.object({ schema: Wall }) },
      isStreamed,
    );
    assert.deepEqual(last.output, wall);
    assert.deepEqual(cities, ["Rome", "Oslo", "Rome", "Oslo"]);
  }
  console.log(`ok: a thought, two calls that the model chooses, then text or an object, by ${api}`);
}

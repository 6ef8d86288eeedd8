// The npm client of OpenAI against a running Motet server: BASE_URL and MODEL come from the environment.
// Each check is one promise; a failed one throws, and the exit status is the number of failures.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Say hello." }];
const greedy = { model, messages, temperature: 0, max_tokens: 12 };

const checks = {
  async "models are listed"() {
    const ids = (await client.models.list()).data.map((m) => m.id);
    assert.ok(ids.includes(model), `expected ${model} among ${ids}`);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async "a chat completion"() {
    const answer = await client.chat.completions.create(greedy);
    assert.equal(answer.object, "chat.completion");
    assert.ok(answer.choices[0].message.content.length > 0);
    assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },

  async "streamed text equals whole text"() {
    const whole = await client.chat.completions.create(greedy);
    const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null, finish = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(finish, whole.choices[0].finish_reason);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },

  async "the streaming helper assembles the message"() {
    const runner = client.chat.completions.stream(greedy);
    let deltas = "";
    runner.on("content", (delta) => (deltas += delta));
    const final = await runner.finalChatCompletion();
    assert.equal(deltas, final.choices[0].message.content);
  },

  async "a stream that is left ends the request, and the server goes on"() {
    const stream = await client.chat.completions.create({ ...greedy, max_tokens: 120, ignore_eos: true, stream: true });
    for await (const _ of stream) break;
    assert.ok((await client.chat.completions.create(greedy)).choices.length === 1);
  },

  async "a text completion with log probabilities"() {
    const answer = await client.completions.create({ model, prompt: "One, two, three,", max_tokens: 5, temperature: 0, logprobs: 2 });
    assert.equal(answer.object, "text_completion");
    assert.equal(answer.choices[0].logprobs.tokens.length, answer.usage.completion_tokens);
  },

  async "several choices"() {
    const answer = await client.chat.completions.create({ ...greedy, temperature: 1, seed: 1, n: 3 });
    assert.deepEqual(answer.choices.map((c) => c.index), [0, 1, 2]);
  },

  async "an unknown model is a NotFoundError"() {
    await assert.rejects(client.chat.completions.create({ ...greedy, model: "no-such-model" }), OpenAI.NotFoundError);
  },

  async "a bad value is a BadRequestError that names its field"() {
    await assert.rejects(client.chat.completions.create({ ...greedy, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  },
};

let numFailed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`held    ${name}`);
  } catch (error) {
    numFailed += 1;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
process.exit(numFailed);

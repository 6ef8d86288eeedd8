// The npm client of OpenAI against a running Motet server: BASE_URL, and MODEL (which writes), VOICE (a model that speaks) or
// IMAGE (one that makes pictures), come from the environment.
// Each check is one promise; a failed one throws, and the exit status is the number of failures.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.MODEL, voice = process.env.VOICE, image = process.env.IMAGE;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Say hello." }];
const greedy = { model, messages, temperature: 0, max_tokens: 12 };

const writing = {
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

const words = { model: voice, voice: "default", input: "Hello there, my friend. How are you today?" };
const magic = { mp3: [0xff], opus: [..."OggS"], aac: [0xff], flac: [..."fLaC"], wav: [..."RIFF"], pcm: [] };
const types = { mp3: "audio/mpeg", opus: "audio/ogg", aac: "audio/aac", flac: "audio/flac", wav: "audio/wav", pcm: "audio/pcm" };

const speaking = {
  async "speech in every format, in a type that says so"() {
    for (const [format, begin] of Object.entries(magic)) {
      const answer = await client.audio.speech.create({ ...words, response_format: format });
      assert.equal(answer.headers.get("content-type"), types[format]);
      const bytes = Buffer.from(await answer.arrayBuffer());
      assert.ok(bytes.length > 4000, `${format}: ${bytes.length} bytes`);
      begin.forEach((want, at) => assert.equal(bytes[at], typeof want === "string" ? want.charCodeAt(0) : want, format));
    }
  },

  async "mp3 is the default, and the same seed is the same sound"() {
    const [one, two] = await Promise.all([0, 1].map(() => client.audio.speech.create({ ...words, seed: 7 })));
    assert.equal(one.headers.get("content-type"), "audio/mpeg");
    assert.ok(Buffer.from(await one.arrayBuffer()).equals(Buffer.from(await two.arrayBuffer())));
  },

  async "speech comes in pieces, also as events"() {
    const answer = await client.audio.speech.create({ ...words, response_format: "pcm" });
    let pieces = 0;
    for await (const _ of answer.body) pieces += 1;
    assert.ok(pieces > 2, `${pieces} pieces`);
    const stream = await client.audio.speech.create({ ...words, response_format: "pcm", stream_format: "sse" });
    const events = (await stream.text()).split("\n\n").filter((line) => line.startsWith("data: {")).map((line) => JSON.parse(line.slice(6)));
    const last = events.pop();
    assert.equal(last.type, "speech.audio.done");
    assert.equal(last.usage.total_tokens, last.usage.input_tokens + last.usage.output_tokens);
    assert.ok(events.every((event) => event.type === "speech.audio.delta") && events.length > 2);
  },

  async "twice as fast is half as long"() {
    const length = async (speed) =>
      (await (await client.audio.speech.create({ ...words, seed: 7, response_format: "pcm", speed })).arrayBuffer()).byteLength;
    const ratio = (await length(1)) / (await length(2));
    assert.ok(Math.abs(ratio - 2) < 0.1, `${ratio}`);
  },

  async "speech that is left ends the request, and the server goes on"() {
    const answer = await client.audio.speech.create({ ...words, input: words.input.repeat(20), response_format: "pcm" });
    for await (const _ of answer.body) break;
    assert.ok((await (await client.audio.speech.create(words)).arrayBuffer()).byteLength > 0);
  },

  async "an unknown voice, no text, a speed too fast: BadRequestErrors that name their field"() {
    for (const [param, value] of [["voice", "nobody"], ["input", ""], ["input", "🎉"], ["speed", 5], ["response_format", "midi"]]) {
      await assert.rejects(client.audio.speech.create({ ...words, [param]: value }), (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        assert.equal(error.param, param);
        return true;
      });
    }
  },
};

const scene = { model: image, prompt: "a red apple on a blue background", seed: 7 };
const bytes = (picture) => Buffer.from(picture.b64_json, "base64");
const side = (png) => [png.readUInt32BE(16), png.readUInt32BE(20)];

const painting = {
  async "a picture of the size that the answer says, and its usage"() {
    const answer = await client.images.generate(scene);
    const png = bytes(answer.data[0]);
    assert.equal(png.toString("latin1", 1, 4), "PNG");
    assert.equal(side(png).join("x"), answer.size);
    assert.equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens);
    assert.ok(answer.usage.input_tokens > 0 && answer.created > 1.7e9);
  },

  async "the same seed is the same picture, and several have seeds of their own"() {
    const [one, two] = [await client.images.generate(scene), await client.images.generate(scene)];
    assert.ok(bytes(one.data[0]).equals(bytes(two.data[0])));
    const both = await client.images.generate({ ...scene, n: 2 });
    assert.deepEqual(both.data.map((picture) => picture.seed), [7, 8]);
    assert.ok(!bytes(both.data[0]).equals(bytes(both.data[1])));
  },

  async "a stream of partial images and the picture"() {
    const stream = await client.images.generate({ ...scene, stream: true, partial_images: 2 });
    const events = [];
    for await (const event of stream) events.push(event);
    const last = events.pop();
    assert.equal(last.type, "image_generation.completed");
    assert.ok(last.usage.total_tokens > 0);
    assert.ok(events.length <= 2);
    events.forEach((event, index) => {
      assert.equal(event.type, "image_generation.partial_image");
      assert.equal(event.partial_image_index, index);
      assert.equal(side(bytes(event)).join("x"), event.size);
    });
  },

  async "every format"() {
    for (const [output_format, begin] of [["png", "\x89PNG"], ["jpeg", "\xff\xd8\xff"], ["webp", "RIFF"]]) {
      const answer = await client.images.generate({ ...scene, output_format });
      assert.equal(bytes(answer.data[0]).toString("latin1", 0, begin.length), begin);
    }
  },

  async "a picture that is left ends the request, and the server goes on"() {
    const stream = await client.images.generate({ ...scene, stream: true, partial_images: 1 });
    for await (const _ of stream) break;
    assert.equal((await client.images.generate(scene)).data.length, 1);
  },

  async "bad sizes, counts and formats are BadRequestErrors that name their field"() {
    const bad = { prompt: "", size: "63x65", n: 0, steps: 0, guidance_scale: -1, output_format: "gif", response_format: "url", image: "AAAA" };
    for (const [param, value] of Object.entries(bad)) {
      await assert.rejects(client.images.generate({ ...scene, [param]: value }), (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        assert.equal(error.param, param);
        return true;
      });
    }
  },
};

let numFailed = 0;
const checks = { ...(model && writing), ...(voice && speaking), ...(image && painting) };
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

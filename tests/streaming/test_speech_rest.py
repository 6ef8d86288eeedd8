"""/v1/audio/speech and /voices: every format by OpenAI's client and decoded again, then what no client should send."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import av
import msgspec
import numpy as np
import openai
import pytest

from motet.engine.errors import EngineDead, ModelLoadError
from motet.models.speech_format import SpeechFormat, load_format
from motet.pipelines.sound_file import CONTENT_TYPES
from motet.streaming.config import ServedModel
from motet.streaming.exchange import Exchange
from motet.streaming.openai_speech import voices
from motet.streaming.speech_words import AudioDelta, AudioDone, VoiceList

from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_voice import RATE, TTS, VOICE, length_s, write_voice
from .raw_http import connect, get, head, post, read_reply

PATH = "/v1/audio/speech"
TEXT = "Hello there. How are you today?"
SAY = {"model": TTS, "input": TEXT, "voice": VOICE}


def decoded(data: bytes, kind: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The sound of a file of this format as float32 at 24 kHz, read by PyAV."""
    if kind == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=RATE)
    with av.open(io.BytesIO(data), format={"opus": "ogg"}.get(kind, kind)) as container:
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def pitch(samples: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    """The strongest frequency in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum)) * RATE / len(samples)


def spoken_s(server: Running) -> float:
    """Seconds that the voice should have made for its last request, without the pauses between its utterances."""
    return list(server.engine.voices.values())[-1].audio_s


def prompts(server: Running) -> list[str]:
    return [said for voice in server.engine.voices.values() for said in voice.said]


# ----------------------------------------------------------------------------------------------------- openai's client


@pytest.mark.parametrize("kind", list(CONTENT_TYPES))
def test_every_format(server: Running, kind: Any) -> None:
    answer = server.client().audio.speech.with_raw_response.create(**SAY, response_format=kind)
    assert answer.headers["content-type"] == CONTENT_TYPES[kind]
    assert (answer.headers["x-motet-model"], "content-length" in answer.headers) == (TTS, False)
    samples = decoded(answer.content, kind)
    made = spoken_s(server)
    assert made - 0.1 <= len(samples) / RATE <= made + 1.0  # encoders add a little, the frontend pauses
    assert abs(pitch(samples[RATE // 20 : RATE // 5]) - 300) < 20 and 0.2 < np.abs(samples).max() < 0.4
    assert prompts(server) == ["hello there.", "how are you today?"]


def test_mp3_is_the_default_and_pieces_come_before_the_end(server: Running) -> None:
    server.engine.step_s = 0.02
    long = {**SAY, "input": "Hello there, my dear old friend. " * 20}
    with server.client().audio.speech.with_streaming_response.create(**long) as response:
        assert response.headers["content-type"] == "audio/mpeg"
        pieces = response.iter_bytes(256)
        first = next(pieces)
        assert server.engine.live and first  # it is still speaking
        data = first + b"".join(pieces)
    assert len(decoded(data, "mp3")) / RATE > spoken_s(server) - 0.1


def test_a_wave_file_that_nobody_knows_the_length_of(server: Running) -> None:
    data = server.client().audio.speech.create(**SAY, response_format="wav").content
    assert (data[:4], data[4:8], data[8:12]) == (b"RIFF", b"\xff" * 4, b"WAVE")
    assert data[data.index(b"data") + 4 :][:4] == b"\xff" * 4


def test_events(server: Running) -> None:
    reply = post(server.port, PATH, {**SAY, "stream_format": "sse", "response_format": "pcm", "seed": 5})
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = reply.body.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    done = msgspec.json.decode(frames[-3][6:], type=AudioDone)
    usage = done.usage
    assert usage.input_tokens > len(TEXT) - 4 and usage.output_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    deltas = [msgspec.json.decode(frame[6:], type=AudioDelta) for frame in frames[:-3]]
    sound = b"".join(base64.b64decode(delta.audio) for delta in deltas)
    assert len(deltas) > 3 and sound == server.client().audio.speech.create(**SAY, response_format="pcm").content


def test_what_is_asked_reaches_the_voice(server: Running) -> None:
    client = server.client()
    client.audio.speech.create(
        model="default",
        input="One.",
        voice={"id": VOICE},
        instructions="Whisper.",
        extra_body={"seed": -3, "temperature": 0.0, "user": "x"},
    )
    client.audio.speech.create(model=TTS, input="Two.", voice="default")
    first, second = (voice.request for voice in server.engine.voices.values())
    assert first.params is not None and first.params.temperature == 0 and first.params.seed == -3 % 2**62
    assert first.params.top_k == 50  # the voice's own
    assert second.params is None


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_speed_changes_the_length_and_not_the_pitch(server: Running, speed: float) -> None:
    plain = server.client().audio.speech.create(model=TTS, voice=VOICE, input="Hello.", response_format="pcm").content
    data = (
        server.client()
        .audio.speech.create(model=TTS, voice=VOICE, input="Hello.", response_format="pcm", speed=speed)
        .content
    )
    assert len(data) == pytest.approx(len(plain) / speed, rel=0.15, abs=0.06 * RATE)
    if speed <= 2:
        samples = decoded(data, "pcm")
        assert abs(pitch(samples[len(samples) // 4 : -len(samples) // 4]) - 300) < 40


def test_voices(server: Running) -> None:
    reply = get(server.port, "/v1/audio/voices")
    listed = msgspec.json.decode(reply.body, type=VoiceList).voices
    assert [(voice.id, voice.name, voice.model, voice.language, voice.default) for voice in listed] == [
        (VOICE, VOICE, TTS, "en", True)
    ]
    models = json.loads(get(server.port, "/v1/models").body)["data"]
    assert [model["capabilities"] for model in models if model["id"] == TTS] == [["speech"]]


@pytest.mark.parametrize("ids", [("broken", TTS), ("broken",)])
def test_voices_of_a_model_that_cannot_be_loaded(ids: tuple[str, ...], tmp_path: Path) -> None:
    voice = load_format(write_voice(tmp_path))

    async def format_of(model: str) -> SpeechFormat:
        if model == "broken":
            raise ModelLoadError("its weights are gone")
        return voice

    sent: list[VoiceList] = []

    async def send_struct(body: VoiceList) -> None:
        sent.append(body)

    models = [ServedModel(id=name, kind="tts") for name in ids]
    service = SimpleNamespace(config=SimpleNamespace(models=models), speech=SimpleNamespace(format=format_of))
    exchange = cast(Exchange, SimpleNamespace(service=service, send_struct=send_struct))
    if TTS in ids:
        asyncio.run(voices(exchange))
        assert [body.model for body in sent[0].voices] == [TTS]
    else:
        with pytest.raises(ModelLoadError, match="weights are gone"):
            asyncio.run(voices(exchange))


def test_openapi_tells_the_types(server: Running) -> None:
    operation = json.loads(get(server.port, "/openapi.json").body)["paths"][PATH]["post"]
    content = operation["responses"]["200"]["content"]
    assert set(content) == {*CONTENT_TYPES.values(), "text/event-stream"}
    assert content["audio/mpeg"]["schema"] == {"type": "string", "format": "binary"}


# ------------------------------------------------------------------------------------------- what no one should send


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": " \n\t"}, 400, "input"),
        ({"input": "x" * 100_000}, 400, "input"),
        ({"input": "🎉👍🏽 \u200b\u2603"}, 400, "input"),
        ({"input": "\x00\x01\x1b\x7f\u202e"}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"input": 7}, 400, "input"),
        ({"input": ["a"]}, 400, "input"),
        ({"voice": "nobody"}, 400, "voice"),
        ({"voice": {"id": "nobody"}}, 400, "voice"),
        ({"voice": {"id": ""}}, 400, "voice.id"),
        ({"voice": {"name": "ann"}}, 400, "voice.name"),
        ({"voice": 3}, 400, "voice"),
        ({"voice": "a" * 1000}, 400, "voice"),
        ({"speed": 0.2}, 400, "speed"),
        ({"speed": 4.1}, 400, "speed"),
        ({"speed": -1}, 400, "speed"),
        ({"speed": "fast"}, 400, "speed"),
        ({"speed": True}, 400, "speed"),
        ({"response_format": "midi"}, 400, "response_format"),
        ({"response_format": ["mp3"]}, 400, "response_format"),
        ({"stream_format": "websocket"}, 400, "stream_format"),
        ({"instructions": 5}, 400, "instructions"),
        ({"seed": 2**70}, 400, "seed"),
        ({"temperature": 3}, 400, "temperature"),
        ({"colour": "red"}, 400, "colour"),
        ({"model": "nobody"}, 404, "model"),
        ({"model": MODEL}, 400, "model"),
        ({"model": ASR}, 400, "model"),
    ],
)
def test_bad_values_are_named(server: Running, change: dict[str, Any], status: int, param: str) -> None:
    reply = post(server.port, PATH, {**SAY, **change})
    assert (reply.status, reply.error["param"]) == (status, param), reply
    assert not server.engine.voices


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_no_number_is_no_speed(server: Running, word: str) -> None:
    reply = post(server.port, PATH, json.dumps({**SAY, "speed": 123.5}).replace("123.5", word).encode())
    assert (reply.status, reply.error["param"]) == (400, "speed")


def test_missing_and_broken_bodies(server: Running) -> None:
    assert post(server.port, PATH, {"model": TTS}).error["param"] == "input"
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"input":"\\ud800"}'):
        assert post(server.port, PATH, body).status == 400
    assert post(server.port, PATH, SAY, content_type="text/plain").status == 415
    assert get(server.port, PATH).status == 405


def test_huge_bodies(start_server: Callable[..., Running]) -> None:
    server = start_server(max_body_bytes=1 << 20)
    reply = post(server.port, PATH, {**SAY, "input": "x" * (2 << 20)})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_words_among_emoji_are_spoken(server: Running) -> None:
    reply = post(server.port, PATH, {**SAY, "input": "\x07Hi 🎉 there\u200b!", "response_format": "pcm"})
    assert reply.status == 200 and prompts(server) and all("hi" in said for said in prompts(server)[:1])


# ------------------------------------------------------------------------------------------------ failing and leaving


def test_failures(server: Running) -> None:
    server.engine.submit_error = EngineDead("the engine ended")
    reply = post(server.port, PATH, SAY)
    assert (reply.status, reply.error["code"]) == (503, "engine_dead")
    server.engine.submit_error, server.engine.fail_after = None, 3
    with pytest.raises((openai.APIConnectionError, openai.APIError, Exception), match="(?i)incomplete|closed|peer"):
        with server.client().audio.speech.with_streaming_response.create(**SAY, response_format="pcm") as response:
            b"".join(response.iter_bytes())  # half a file must not look like a whole one
    reply = post(server.port, PATH, {**SAY, "stream_format": "sse"})
    frames = reply.body.split(b"\n\n")
    assert json.loads(frames[-3][6:])["error"]["code"] == "engine_dead" and frames[-2] == b"data: [DONE]"


def test_leaving_ends_the_speech(server: Running) -> None:
    server.engine.step_s = 0.01
    body = json.dumps({**SAY, "input": "Hello there. " * 200, "response_format": "pcm"}).encode()
    for _ in range(3):
        with connect(server.port) as connection:
            connection.sendall(head(PATH, length=len(body)) + body)
            connection.recv(4096)
    server.wait(lambda engine: not engine.live and len(engine.ended) == 3, "the speech is aborted")
    assert set(server.engine.ended.values()) == {"abort: disconnect"}


def test_a_reader_that_does_not_read(start_server: Callable[..., Running]) -> None:
    """What waits for him is bounded, and then he is dropped."""
    server = start_server(write_timeout_s=0.5)
    body = json.dumps({**SAY, "input": "Hello there, how are you. " * 700, "response_format": "pcm"}).encode()
    with connect(server.port) as connection:
        connection.sendall(head(PATH, length=len(body)) + body)
        server.wait(lambda engine: bool(engine.voices), "it begins")
        server.wait(lambda engine: not engine.live and len(engine.ended) == 1, "it is given up", 6)
    voice = next(iter(server.engine.voices.values()))
    assert voice.audio_s < 150  # of the 700 s that the text would take: sockets hold a minute
    assert list(server.engine.ended.values()) == ["abort: slow_reader"]


def test_too_many_wait(start_server: Callable[..., Running]) -> None:
    server = start_server(max_queued_requests=1)
    server.engine.first_s = 0.5
    with connect(server.port) as first:
        body = json.dumps(SAY).encode()
        first.sendall(head(PATH, length=len(body)) + body)
        server.wait(lambda engine: bool(engine.voices), "the first waits")
        reply = post(server.port, PATH, SAY)
        assert (reply.status, reply.error["code"]) == (429, "server_overloaded") and "retry-after" in reply.headers
        assert read_reply(first).status == 200


def test_two_at_once_and_a_chat(server: Running) -> None:
    server.engine.step_s = 0.005
    sounds: list[bytes] = []

    def say() -> None:
        sounds.append(server.client().audio.speech.create(**SAY, response_format="pcm").content)

    threads = [threading.Thread(target=say) for _ in range(2)]
    for thread in threads:
        thread.start()
    chat = server.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    for thread in threads:
        thread.join()
    assert said == server.engine.reply and len(sounds) == 2 and sounds[0] == sounds[1]


def test_silence_is_broken_in_events(start_server: Callable[..., Running]) -> None:
    server = start_server(sse_keep_alive_s=0.05)
    server.engine.first_s = 0.3
    body = post(server.port, PATH, {**SAY, "stream_format": "sse"}).body
    assert body.startswith(b": keep-alive\n\n") and body.endswith(b"data: [DONE]\n\n")


def test_counted(server: Running) -> None:
    def value(name: str) -> float:
        text = get(server.port, "/metrics").body.decode()
        return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)))

    post(server.port, PATH, SAY)
    name = f'motet_requests_success_total{{finished_reason="stop",model="{TTS}"}}'
    before = value(name)
    post(server.port, PATH, SAY)
    assert value(name) == before + 1
    assert value(f'motet_time_to_first_token_seconds_count{{model="{TTS}"}}') >= 2
    assert value("motet_queue_depth") == 0


def test_length_of_a_prompt_is_what_the_fake_says(server: Running) -> None:
    """The fake is honest: without it the lengths above would mean nothing."""
    data = server.client().audio.speech.create(model=TTS, voice=VOICE, input="Hello.", response_format="pcm").content
    (voice,) = server.engine.voices.values()
    assert len(data) / 2 / RATE == pytest.approx(length_s(voice.request.utterances[0]), abs=0.01)

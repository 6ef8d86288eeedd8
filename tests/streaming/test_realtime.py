"""Realtime transcription sessions: by OpenAI's client, by hand, and by clients that misbehave."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection

from motet.engine.errors import EngineDead, Overloaded
from motet.streaming.live_stream import G711

from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_recogniser import s16, sound
from .raw_http import get
from .test_audio_stream import close_code, events, opened, refused

PATH = "/v1/realtime"
TRANSCRIPTION = "conversation.item.input_audio_transcription"
Event = dict[str, Any]


@contextmanager
def session(server: Running, query: str = "intent=transcription", **options: Any) -> Iterator[ClientConnection]:
    with opened(server, query, PATH, **options) as ws:
        first = json.loads(ws.recv(timeout=5))
        assert first["type"].endswith("session.created")
        yield ws


def send(ws: ClientConnection, kind: str, **fields: Any) -> None:
    ws.send(json.dumps({"type": kind, **fields}))


def say(ws: ClientConnection, data: bytes, piece: int = 4800) -> None:
    for start in range(0, len(data), piece):
        audio = base64.b64encode(data[start : start + piece]).decode()
        send(ws, "input_audio_buffer.append", audio=audio)


def until(ws: ClientConnection, kind: str, count: int = 1) -> list[Event]:
    """Events up to the count-th of this type."""
    found: list[Event] = []
    while count:
        found.append(json.loads(ws.recv(timeout=10)))
        count -= found[-1]["type"] == kind
    return found


def update(ws: ClientConnection, **fields: Any) -> Event:
    """Set what is in session.audio.input; returns the event that answers."""
    send(ws, "session.update", event_id="mine", session={"type": "transcription", "audio": {"input": fields}})
    answer: Event = json.loads(ws.recv(timeout=5))
    return answer


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning:openai")  # how that client uses websockets
def test_openai_client_with_server_vad(server: Running) -> None:
    """Two stretches of speech in one stream of 20 ms pieces: every event in its place, in the client's own types."""
    client = server.client()
    got = []
    with client.realtime.connect(model=ASR, extra_query={"intent": "transcription"}) as connection:
        created = connection.recv()
        assert created.type == "session.created"
        connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "transcription": {"model": ASR, "language": "en", "delay": "low"},
                        "turn_detection": {"type": "server_vad", "threshold": 0.6, "silence_duration_ms": 200},
                    }
                },
            }
        )
        updated = connection.recv()
        assert updated.type == "session.updated"
        given = updated.session.audio.input  # type: ignore[union-attr]
        assert (given.transcription.model, given.turn_detection.silence_duration_ms) == (ASR, 200)  # type: ignore[union-attr]
        audio = s16(sound(2.0, silence_s=0.4, rate=24000)) + s16(sound(1.0, silence_s=0.4, rate=24000))
        for start in range(0, len(audio), 960):
            connection.input_audio_buffer.append(audio=base64.b64encode(audio[start : start + 960]).decode())
        while sum(event.type == f"{TRANSCRIPTION}.completed" for event in got) < 2:
            got.append(connection.recv())
    kinds = [event.type for event in got]
    deltas = kinds.count(f"{TRANSCRIPTION}.delta")
    assert deltas >= 2
    assert [kind for kind in kinds if not kind.endswith(".delta")] == 2 * [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        f"{TRANSCRIPTION}.completed",
    ]
    completed = [event for event in got if event.type == f"{TRANSCRIPTION}.completed"]
    assert [event.transcript for event in completed] == ["one two three four", "one two"]
    for event in completed:
        said = "".join(e.delta for e in got if e.type == f"{TRANSCRIPTION}.delta" and e.item_id == event.item_id)
        assert said == event.transcript
        assert event.usage.type == "duration" and 0.9 < event.usage.seconds < 2.2
    first, second = (event for event in got if event.type == "conversation.item.added")
    assert first.previous_item_id is None and second.previous_item_id == first.item.id
    started = [event for event in got if event.type == "input_audio_buffer.speech_started"]
    assert started[0].item_id == first.item.id and abs(started[1].audio_start_ms - 2400) < 60
    options = server.engine.audio[0].options
    assert (options.vad_threshold, options.end_silence_s, options.language) == (0.6, 0.2, "en")
    server.wait(lambda engine: not engine.live, "the stream ends with its session")


@pytest.mark.parametrize(("prompt", "texts"), [("in two", [" one one"] * 2), ("no words", ["", ""])])
def test_an_item_is_complete_when_the_engine_says_so(server: Running, prompt: str, texts: list[str]) -> None:
    """Not when its text reaches the end of speech, which it may never do, and not some time later."""
    with session(server) as ws:
        update(ws, transcription={"model": ASR, "prompt": prompt})
        for _ in range(2):
            say(ws, s16(sound(6.0, silence_s=0.8, rate=24000)))
        got = until(ws, f"{TRANSCRIPTION}.completed", 2)
        assert [e["transcript"] for e in got if e["type"] == f"{TRANSCRIPTION}.completed"] == [t.strip() for t in texts]


def test_manual_commits(server: Running) -> None:
    with session(server) as ws:
        assert update(ws, turn_detection=None)["session"]["audio"]["input"]["turn_detection"] is None
        texts = []
        for speech_s in (1.0, 0.5):
            say(ws, s16(sound(speech_s, rate=24000)))
            send(ws, "input_audio_buffer.commit")
            got = until(ws, f"{TRANSCRIPTION}.completed")
            kinds = [event["type"] for event in got if not event["type"].endswith(".delta")]
            assert kinds == [
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
                f"{TRANSCRIPTION}.completed",
            ]
            assert abs(got[-1]["usage"]["seconds"] - speech_s) < 0.02
            texts.append(got[-1]["transcript"])
        assert texts == ["one two", "one"]
        assert [request.options.vad for request in server.engine.audio] == [False, False]


def test_commit_of_too_little_and_clear(server: Running) -> None:
    with session(server) as ws:
        update(ws, turn_detection=None)
        for data in (b"", s16(sound(0.09, rate=24000))):
            say(ws, data)
            send(ws, "input_audio_buffer.commit", event_id="e1")
            error = json.loads(ws.recv(timeout=5))["error"]
            assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "e1")
        say(ws, s16(sound(1.0, rate=24000)))
        send(ws, "input_audio_buffer.clear")
        assert until(ws, "input_audio_buffer.cleared")[-1]
        server.wait(lambda engine: not engine.live, "what was cleared is aborted")
        send(ws, "input_audio_buffer.commit")
        assert json.loads(ws.recv(timeout=5))["error"]["code"] == "input_audio_buffer_commit_empty"
        say(ws, s16(sound(0.5, rate=24000)))
        send(ws, "input_audio_buffer.commit")
        assert until(ws, f"{TRANSCRIPTION}.completed")[-1]["transcript"] == "one"


def test_commit_while_speech_goes_on(server: Running) -> None:
    with session(server) as ws:
        say(ws, s16(sound(1.0, rate=24000)))
        started = until(ws, "input_audio_buffer.speech_started")[-1]
        send(ws, "input_audio_buffer.commit")
        got = until(ws, f"{TRANSCRIPTION}.completed")
        assert got[-1]["item_id"] == started["item_id"] and got[-1]["transcript"] == "one two"
        assert sum(event["type"] == "input_audio_buffer.committed" for event in got) == 1
        say(ws, s16(sound(0.5, silence_s=0.6, rate=24000)))
        second = until(ws, f"{TRANSCRIPTION}.completed")
        assert second[-1]["transcript"] == "one" and abs(second[0]["audio_start_ms"] - 1000) < 50


@pytest.mark.parametrize("law", ["ulaw", "alaw"])
def test_g711(server: Running, law: str) -> None:
    kind = {"ulaw": "audio/pcmu", "alaw": "audio/pcma"}[law]
    low, high = G711[law]
    meant = np.frombuffer(bytes(byte for pair in zip(low, high, strict=True) for byte in pair), "<i2").astype(int)
    known = {
        "ulaw": {0xFF: 0, 0x00: -32124, 0x80: 32124, 0xCE: 988},
        "alaw": {0xD5: 8, 0x55: -8, 0xAA: 32256, 0x2A: -32256},
    }
    assert all(meant[byte] == value for byte, value in known[law].items())
    said = np.frombuffer(s16(sound(1.0, silence_s=0.8, rate=8000)), "<i2").astype(int)
    data = np.abs(meant[None] - said[:, None]).argmin(1).astype(np.uint8).tobytes()
    with session(server) as ws:
        assert update(ws, format={"type": kind})["session"]["audio"]["input"]["format"] == {"type": kind}
        say(ws, data, 160)
        assert until(ws, f"{TRANSCRIPTION}.completed")[-1]["transcript"] == "one two"


@pytest.mark.parametrize("subprotocol", [False, True])
def test_the_beta_dialect(server: Running, subprotocol: bool) -> None:
    offers = {"subprotocols": ["realtime", "openai-beta.realtime-v1"]}
    header = {"additional_headers": {"openai-beta": "realtime=v1"}}
    with session(server, **(offers if subprotocol else header)) as ws:
        wanted = {
            "input_audio_format": "pcm16",
            "input_audio_transcription": {"model": ASR, "language": "en"},
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
        }
        send(ws, "transcription_session.update", session=wanted)
        updated = json.loads(ws.recv(timeout=5))
        assert updated["type"] == "transcription_session.updated"
        assert updated["session"]["turn_detection"]["silence_duration_ms"] == 300
        say(ws, s16(sound(0.5, silence_s=0.5, rate=24000)))
        kinds = {event["type"] for event in until(ws, f"{TRANSCRIPTION}.completed")}
        assert "conversation.item.created" in kinds and "conversation.item.added" not in kinds


def test_settings_merge(server: Running) -> None:
    with session(server) as ws:
        update(ws, transcription={"language": "English", "prompt": "Hm."})
        update(
            ws,
            transcription={"keywords": ["Motet", "Josquin"]},
            turn_detection={"type": "server_vad", "threshold": 0.7},
        )
        shown = update(ws, turn_detection={"type": "server_vad", "prefix_padding_ms": 100})["session"]
        given = shown["audio"]["input"]
        assert given["transcription"] == {
            "model": "default",
            "language": "en",
            "prompt": "Hm.",
            "keywords": ["Motet", "Josquin"],
        }
        assert given["turn_detection"]["threshold"] == 0.7 and given["turn_detection"]["prefix_padding_ms"] == 100
        send(ws, "session.update", session=shown)  # what was shown may come back
        assert json.loads(ws.recv(timeout=5))["session"]["audio"] == shown["audio"]
        say(ws, s16(sound(0.5, silence_s=0.6, rate=24000)))
        until(ws, f"{TRANSCRIPTION}.completed")
        options = server.engine.audio[0].options
        assert (options.hotwords, options.prompt, options.speech_pad_s) == ("Motet, Josquin", "Hm.", 0.1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": {"type": "audio/mp3"}}, "session.audio.input.format.type"),
        ({"format": {"type": "audio/pcm", "rate": 7000}}, "session.audio.input.format.rate"),
        ({"noise_reduction": {"type": "near_field"}}, "session.audio.input.noise_reduction"),
        ({"transcription": {"model": "nobody"}}, "model"),
        ({"transcription": {"model": MODEL}}, "model"),
        ({"transcription": {"language": "xx"}}, "session.audio.input.transcription.language"),
        ({"transcription": {"languages": ["en", "de"]}}, "session.audio.input.transcription.languages"),
        ({"transcription": {"lang": "en"}}, "session.audio.input.transcription.lang"),
        ({"turn_detection": {"type": "semantic_vad"}}, "session.audio.input.turn_detection.type"),
        ({"turn_detection": {"type": "server_vad", "threshold": 2}}, "session.audio.input.turn_detection.threshold"),
        (
            {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}},
            "session.audio.input.turn_detection.idle_timeout_ms",
        ),
    ],
)
def test_updates_that_cannot_be(server: Running, fields: dict[str, Any], param: str) -> None:
    with session(server) as ws:
        answer = update(ws, **fields)
        assert answer["type"] == "error" and answer["error"]["event_id"] == "mine", answer
        assert answer["error"]["param"] == param
        assert update(ws)["type"] == "session.updated"  # the session goes on


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no json", "invalid_json"),
        ("[]", "invalid_value"),
        ('{"event_id": "x"}', "missing_parameter"),
        ('{"type": "input_audio_buffer.append", "audio": 5}', "invalid_value"),
        ('{"type": "x", "session": ' + "[" * 100_000, "invalid_json"),
        ('{"type": "input_audio_buffer.append"}', "missing_parameter"),
        ('{"type": "input_audio_buffer.append", "audio": "!!!"}', "invalid_value"),
        ('{"type": "session.update"}', "missing_parameter"),
        ('{"type": "session.update", "session": {"type": "realtime"}}', "invalid_value"),
        (
            '{"type": "session.update", "session": {"include": ["item.input_audio_transcription.logprobs"]}}',
            "unsupported_parameter",
        ),
        ('{"type": "response.create"}', "unsupported_event"),
        ('{"type": "response.cancel"}', "response_cancel_not_active"),
        ('{"type": "conversation.item.retrieve", "item_id": "x"}', "item_retrieve_invalid_item_id"),
        ('{"type": "hello"}', "unknown_event"),
        (b"\0\0", "invalid_json"),
    ],
)
def test_events_that_cannot_be(server: Running, text: str | bytes, code: str) -> None:
    with session(server) as ws:
        ws.send(text)
        answer = json.loads(ws.recv(timeout=5))
        assert answer["type"] == "error" and answer["error"]["code"] == code and answer["error"]["message"]
        assert update(ws)["type"] == "session.updated"


def test_other_intents_and_models_are_refused(server: Running) -> None:
    assert refused(server, "model=gpt-realtime", PATH)[1]["param"] == "intent"
    assert refused(server, "intent=transcription&model=nobody", PATH)[0] == 404
    assert refused(server, f"intent=transcription&model={MODEL}", PATH)[1]["code"] == "model_not_suitable"


def test_a_failing_engine_fails_the_item_only(server: Running) -> None:
    with session(server) as ws:
        update(ws, turn_detection=None)
        server.engine.submit_error = EngineDead("the engine ended")
        say(ws, s16(sound(0.5, rate=24000)), 1 << 20)
        failed = until(ws, f"{TRANSCRIPTION}.failed")[-1]
        assert failed["error"]["code"] == "engine_dead" and failed["item_id"]
        server.engine.submit_error = None
        say(ws, s16(sound(0.5, rate=24000)))
        send(ws, "input_audio_buffer.commit")
        assert until(ws, f"{TRANSCRIPTION}.completed")[-1]["transcript"] == "one"


def test_an_engine_that_keeps_failing_ends_the_session(server: Running) -> None:
    for error, turns, code in ((Overloaded("full"), 1, 1013), (EngineDead("gone"), 3, 1011)):
        server.engine.submit_error = error
        with session(server) as ws:
            for _ in range(turns):
                say(ws, s16(sound(0.1, rate=24000)), 1 << 20)
                time.sleep(0.1)
            assert events(ws)[-1]["error"]["code"] == error.code and close_code(ws) == code


def test_many_commits_at_once_wait_their_turn(server: Running) -> None:
    server.engine.first_s = 0.05
    with session(server) as ws:
        update(ws, turn_detection=None)
        for _ in range(20):
            say(ws, s16(sound(0.5, rate=24000)), 1 << 20)
            send(ws, "input_audio_buffer.commit")
        got = until(ws, f"{TRANSCRIPTION}.completed", 20)
        committed = [event["item_id"] for event in got if event["type"] == "input_audio_buffer.committed"]
        assert len(set(committed)) == 20


def test_draining_finishes_what_was_said(start_server: Callable[..., Running]) -> None:
    server = start_server()
    with session(server) as ws:
        say(ws, s16(sound(1.0, rate=24000)))
        until(ws, "input_audio_buffer.speech_started")
        server.stop()
        got = events(ws)
        assert got[-1]["error"]["code"] == "draining" and close_code(ws) == 1012
        assert [event["transcript"] for event in got if event["type"] == f"{TRANSCRIPTION}.completed"] == ["one two"]


def test_sessions_are_counted(server: Running) -> None:
    with session(server) as ws:
        say(ws, s16(sound(0.5, silence_s=0.6, rate=24000)))
        until(ws, f"{TRANSCRIPTION}.completed")
        text = get(server.port, "/metrics").body.decode()
        assert 'motet_websocket_connections_active{route="/v1/realtime"} 1.0' in text
        ws.close()
        assert not events(ws) and close_code(ws) == 1000
    server.wait(lambda engine: not engine.live, "the stream ends")
    assert f'motet_asr_audio_seconds_total{{model="{ASR}"}}' in get(server.port, "/metrics").body.decode()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events_keeps_the_books(server: Running, seed: int) -> None:
    """Whatever a client does when: every committed item gets one transcript, in a chain, and deltas have a known item."""
    chance = random.Random(seed)
    vad = {"type": "server_vad", "silence_duration_ms": 200}
    with session(server) as ws:
        for _ in range(40):
            what = chance.choice(["speech"] * 6 + ["silence"] * 3 + ["commit", "clear", "vad", "manual", "pause"])
            if what in ("speech", "silence"):
                length = chance.choice([0.02, 0.3, 1.1])
                audio = sound(
                    length if what == "speech" else 0, silence_s=length if what == "silence" else 0, rate=24000
                )
                say(ws, s16(audio), chance.choice([480, 4801, 1 << 20]))
            elif what in ("vad", "manual"):
                inside = {"input": {"turn_detection": vad if what == "vad" else None}}
                send(ws, "session.update", session={"type": "transcription", "audio": inside})
            elif what == "pause":
                time.sleep(0.01)
            else:
                send(ws, f"input_audio_buffer.{what}")
        send(ws, "session.update", session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        say(ws, s16(sound(0.6, rate=24000)))
        send(ws, "input_audio_buffer.commit")
        send(ws, "session.update", session={"audio": {"input": {"transcription": {"prompt": "the end"}}}})
        got: list[Event] = []
        heard = silent = False
        while not heard or server.engine.live or not silent:
            try:
                got.append(json.loads(ws.recv(timeout=0.15)))
                silent = False
            except TimeoutError:
                silent = True
            heard = heard or "the end" in str(got[-1])
    committed = [event for event in got if event["type"] == "input_audio_buffer.committed"]
    completed = [event["item_id"] for event in got if event["type"] == f"{TRANSCRIPTION}.completed"]
    assert sorted(completed) == sorted(event["item_id"] for event in committed)
    assert len(set(completed)) == len(completed)
    chain = [event["previous_item_id"] for event in committed]
    assert chain == [None, *(event["item_id"] for event in committed[:-1])]
    errors = {event["error"]["code"] for event in got if event["type"] == "error"}
    assert errors <= {"input_audio_buffer_commit_empty"}
    known: set[str] = set()
    ended: set[str] = set()
    for event in got:
        if event["type"].endswith((".speech_started", ".committed")):
            known.add(event["item_id"])
        elif event["type"] == f"{TRANSCRIPTION}.delta":
            assert event["item_id"] not in ended
        elif event["type"] == f"{TRANSCRIPTION}.completed":
            assert event["item_id"] in known
            ended.add(event["item_id"])
    server.wait(lambda engine: not engine.live, "everything has ended")

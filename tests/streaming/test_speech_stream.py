"""The speech socket: text in pieces becomes sound and marks; cancels, misuse, slow and vanishing clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import websockets
from starlette.types import Message
from websockets.sync.client import ClientConnection, connect

from motet.engine.errors import EngineDead, MotetError
from motet.streaming.config import ServerConfig
from motet.streaming.service import Service
from motet.streaming.session import SocketSession

from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_voice import RATE, TTS, VOICE
from .raw_http import frame, get, open_websocket
from .test_speech_rest import decoded, pitch

PATH = "/v1/audio/speech/stream"
FLUSH, CANCEL, END = ({"type": word} for word in ("flush", "cancel", "end"))


@contextmanager
def opened(server: Running, query: str = "", **options: Any) -> Iterator[ClientConnection]:
    url = f"ws://127.0.0.1:{server.port}{PATH}{'?' if query else ''}{query}"
    with connect(url, **{"compression": None, "close_timeout": 2, "max_size": None, **options}) as ws:
        yield ws


def say(ws: ClientConnection, *words: str | dict[str, Any]) -> None:
    for word in words:
        ws.send(json.dumps({"type": "text", "text": word} if isinstance(word, str) else word))


class Heard:
    """What a session has sent: messages in their order, sound as bytes."""

    def __init__(self) -> None:
        self.log: list[dict[str, Any] | bytes] = []

    def until(self, ws: ClientConnection, kind: str | None = None) -> Heard:
        """Hear on up to a message of this kind, or to the close."""
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                got = ws.recv(timeout=10)
                self.log.append(got if isinstance(got, bytes) else json.loads(got))
                if kind is not None and not isinstance(got, bytes) and self.log[-1]["type"] == kind:  # type: ignore[index]
                    return self
        assert kind is None, f"closed before {kind}"
        return self

    @property
    def frames(self) -> list[bytes]:
        return [entry for entry in self.log if isinstance(entry, bytes)]

    @property
    def sound(self) -> bytes:
        return b"".join(self.frames)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log if isinstance(entry, dict) and entry["type"] == kind]

    @property
    def last(self) -> dict[str, Any]:
        assert isinstance(self.log[-1], dict)
        return self.log[-1]


def said(server: Running) -> list[str]:
    return [text for voice in server.engine.voices.values() for text in voice.said]


def test_text_in_odd_pieces(server: Running) -> None:
    with opened(server, f"model={TTS}&voice={VOICE}&seed=7&temperature=0.5") as ws:
        ready = json.loads(ws.recv())
        assert (ready["type"], ready["model"], ready["voice"], ready["format"]) == ("ready", TTS, VOICE, "pcm")
        assert (ready["rate"], ready["channels"], ready["content_type"]) == (RATE, 1, "audio/pcm")
        for letter in "Hello there, my friend. How are you today?":
            say(ws, letter)
        say(ws, END)
        heard = Heard().until(ws)
    assert ws.protocol.close_code == 1000
    assert " ".join(said(server)) == "hello there, my friend. how are you today?"
    request = next(iter(server.engine.voices.values())).request
    assert request.params is not None and (request.params.seed, request.params.temperature) == (7, 0.5)
    # The sound is whole, and so are the marks: each utterance begins and ends where the sound says so.
    done = heard.last
    assert done["type"] == "done" and done["audio_s"] == pytest.approx(len(heard.sound) / 2 / RATE, abs=0.002)
    assert done["usage"]["input_tokens"] > 0 < done["usage"]["output_tokens"]
    marks = heard.of("utterance")
    begun, ended = [mark for mark in marks if "end_s" not in mark], [mark for mark in marks if "end_s" in mark]
    assert [mark["index"] for mark in begun] == list(range(len(said(server)))) == [mark["index"] for mark in ended]
    assert " ".join(mark["text"] for mark in begun) == " ".join(said(server))
    samples = decoded(heard.sound, "pcm")
    for number, mark in enumerate(ended):
        part = samples[round(mark["start_s"] * RATE) : round(mark["end_s"] * RATE)]
        part = part[np.flatnonzero(np.abs(part) > 0.01)[0] :]  # after the pause
        assert abs(pitch(part) - (300 + 100 * number)) < 10
    lengths = [len(piece) / 2 / RATE for piece in heard.frames]
    assert lengths[0] < 0.1 and max(lengths) <= 0.2 and np.median(lengths) >= 0.1


@pytest.mark.parametrize("kind", ["mp3", "opus", "aac", "flac", "wav"])
def test_each_turn_is_one_file(server: Running, kind: str) -> None:
    with opened(server, f"format={kind}") as ws:
        files = []
        for text in ("Hello there.", "And again, my friend."):
            say(ws, text, FLUSH)
            files.append(Heard().until(ws, "flushed"))
        say(ws, END)
        done = Heard().until(ws).last
    lengths = [len(decoded(file.sound, kind)) / RATE for file in files]
    made = [voice.audio_s for voice in server.engine.voices.values()]
    assert lengths == pytest.approx(made, abs=0.15)
    assert files[1].last["audio_s"] == done["audio_s"] == pytest.approx(sum(made), abs=0.01)


def test_speed(server: Running) -> None:
    with opened(server, "speed=2") as ws:
        say(ws, "Hello there, my friend.", END)
        heard = Heard().until(ws)
    made = next(iter(server.engine.voices.values())).audio_s
    assert len(heard.sound) / 2 / RATE == pytest.approx(made / 2, abs=0.05)
    assert heard.last["audio_s"] == pytest.approx(made / 2, abs=0.01)


def test_a_flush_speaks_what_is_there_and_a_whole_sentence_needs_none(server: Running) -> None:
    with opened(server) as ws:
        say(ws, "Hello there. And then")
        heard = Heard().until(ws, "utterance").until(ws, "utterance")
        assert "end_s" in heard.last and said(server) == ["hello there."]
        time.sleep(0.1)  # half a sentence is not spoken by itself
        assert said(server) == ["hello there."]
        say(ws, " we go", FLUSH)
        assert heard.until(ws, "flushed").last["audio_s"] == pytest.approx(len(heard.sound) / 2 / RATE, abs=0.002)
        assert said(server)[1].startswith("and then we go")
        say(ws, FLUSH, " \n", FLUSH, END)  # nothing to say is no error
        assert Heard().until(ws).last["type"] == "done"


def test_after_a_cancel_comes_no_sound_of_before(server: Running) -> None:
    server.engine.step_s = 0.002
    with opened(server) as ws:
        say(ws, "Hello there, my dear old friend. " * 20, FLUSH, "And this never is said.", FLUSH)
        heard = Heard().until(ws, "utterance")
        heard.log.append(ws.recv())
        say(ws, CANCEL)
        heard.until(ws, "cancelled")
        before = heard.last["audio_s"]
        assert before == pytest.approx(len(heard.sound) / 2 / RATE, abs=0.002)
        server.wait(lambda engine: not engine.live, "the request is aborted")
        assert not any("never" in text for text in said(server))
        say(ws, "Stop.", FLUSH)
        after = Heard().until(ws, "flushed")
        (mark, _) = after.of("utterance")
        assert (mark["text"], mark["start_s"]) == ("stop.", before)
        assert abs(pitch(decoded(after.sound, "pcm")) - 300) < 10  # the new request's first utterance and nothing else
        say(ws, CANCEL, CANCEL, END)
        end = Heard().until(ws)
        assert [entry["type"] for entry in end.log if isinstance(entry, dict)] == ["cancelled", "cancelled", "done"]
        assert end.last["audio_s"] == pytest.approx(before + len(after.sound) / 2 / RATE, abs=0.002)
    ended = list(server.engine.ended.values())
    assert ended[0].startswith("abort") and ended[-1] == "stop"


def test_a_cancel_takes_back_what_a_slow_reader_has_not_been_sent(server: Running) -> None:
    """Everything is spoken and waits to be sent; then the client changes its mind."""
    with opened(server) as ws:
        ws.recv()
        say(ws, "Hello there, my dear old friend. " * 100)
        server.wait(lambda engine: bool(engine.voices), "it speaks")
        time.sleep(0.3)  # ahead as far as it may be
        say(ws, CANCEL)
        heard = Heard().until(ws, "cancelled")
        assert heard.last["audio_s"] == pytest.approx(len(heard.sound) / 2 / RATE, abs=0.002)
        say(ws, END)
        assert not Heard().until(ws).frames


def test_end_then_cancel(server: Running) -> None:
    server.engine.step_s = 0.01
    with opened(server) as ws:
        say(ws, "Hello there, my dear old friend. " * 20, END)
        heard = Heard().until(ws, "utterance")
        say(ws, CANCEL)
        kinds = [entry["type"] for entry in heard.until(ws).log if isinstance(entry, dict)]
    assert kinds[-2:] == ["cancelled", "done"] and ws.protocol.close_code == 1000


class Told(SocketSession):
    """A session that says what a test tells it to."""

    route = "/told"

    async def on_text(self, text: str) -> None: ...

    async def on_binary(self, data: bytes) -> None: ...

    def error_message(self, error: MotetError) -> dict[str, Any]:
        return {"type": "error"}

    async def opened(self) -> None:
        self.start(self.script())

    async def script(self) -> None:
        raise NotImplementedError


def run_told(
    session: type[Told], reading: asyncio.Event, unsent: Callable[[], int] = lambda: 0, **options: Any
) -> list[str]:
    """What a client gets that reads one message, and the others once `reading` is set."""
    sent: list[str] = []

    async def receive() -> Message:
        if not sent:
            return {"type": "websocket.connect"}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            sent.append(message.get("text") or message["bytes"].decode())
            await reading.wait()
        else:
            sent.append(message["type"].partition(".")[2])

    scope = {"type": "websocket", "query_string": b"", "subprotocols": [], "extensions": {"motet.unsent": unsent}}
    service = Service(ServerConfig(**options))
    service.attach(object())  # type: ignore[arg-type]

    async def run() -> None:
        await asyncio.wait_for(session(service, scope, receive, send).run(), 5)

    asyncio.run(run())
    return sent


def test_data_is_taken_back_and_control_is_not() -> None:
    reading = asyncio.Event()

    class Session(Told):
        async def script(self) -> None:
            for number in range(1, 6):
                await self.put_data(str(number).encode(), weight=10**number)
                if number == 3:
                    self.put({"type": "control"})
            await asyncio.sleep(0.01)  # the first is being sent
            assert self.drop_data() == 111100
            self.put({"type": "cancelled"})
            await self.put_data(b"6")
            reading.set()
            await self.sent()
            await self.end(1000)

    sent = run_told(Session, reading)
    assert sent == ["accept", "1", '{"type":"control"}', '{"type":"cancelled"}', "6", "close"]


def test_data_waits_for_the_reader_and_control_does_not() -> None:
    reading = asyncio.Event()
    put = 0

    class Session(Told):
        async def script(self) -> None:
            async def pour() -> None:
                nonlocal put
                while True:
                    await self.put_data(b"x")
                    put += 1

            pouring = self.start(pour())
            await asyncio.sleep(0.05)
            stuck = put
            assert 0 < stuck < 100
            self.put({"type": "control"})
            pouring.cancel()
            await asyncio.wait({pouring})
            assert (put, self.drop_data()) == (stuck, 0)
            reading.set()
            await self.sent()
            await self.end(1000)

    assert run_told(Session, reading) == ["accept", "x", '{"type":"control"}', "close"]


def test_the_end_waits_for_a_slow_reader_and_not_for_one_that_reads_nothing() -> None:
    reading = asyncio.Event()
    reading.set()
    left = iter([60, 60, 40, 40, 1])
    ends: list[str] = []

    class Session(Told):
        async def script(self) -> None:
            await self.put_data(b"last")
            await self.sent()
            ends.append("taken")
            await self.end(1000)

    assert run_told(Session, reading, lambda: next(left, 0), write_timeout_s=0.4) == ["accept", "last", "close"]
    assert next(left, None) is None and ends == ["taken"]
    assert run_told(Session, reading, lambda: 60, write_timeout_s=0.1)[-1] == "close" and ends == ["taken"]


# -------------------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("model=nobody", "model"),
        (f"model={MODEL}", "model"),
        (f"model={ASR}", "model"),
        ("format=midi", "format"),
        ("speed=nan", "speed"),
        ("speed=0.1", "speed"),
        ("speed=inf", "speed"),
        ("seed=x", "seed"),
        ("seed=1.5", "seed"),
        (f"seed={10**30}", "seed"),
        ("temperature=3", "temperature"),
        ("colour=red", "colour"),
    ],
)
def test_bad_queries_are_refused_before_the_upgrade(server: Running, query: str, param: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as info, opened(server, query):
        pass
    response = info.value.response
    assert response.status_code in (400, 404)
    assert json.loads(response.body or b"{}")["error"]["param"] == param


def test_an_unknown_voice(server: Running) -> None:
    with opened(server, "voice=nobody") as ws:
        error = Heard().until(ws).last
    assert (error["type"], error["param"]) == ("error", "voice") and ws.protocol.close_code == 1008
    assert not server.engine.voices


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        "",
        "[]",
        "null",
        '{"type":"speak"}',
        '{"text":"a"}',
        '{"type":"text"}',
        '{"type":"text","text":5}',
        '{"type":"text","text":"\\ud800"}',
        '{"type":"text","text":"a","colour":1}',
        "[" * 100_000,
        b"\0\0",
    ],
)
def test_what_is_no_word_of_ours(server: Running, message: str | bytes) -> None:
    with opened(server) as ws:
        ws.send(message)
        assert Heard().until(ws).last["type"] == "error" and ws.protocol.close_code == 1003
    server.wait(lambda engine: not engine.live, "nothing is left")


def test_text_that_cannot_be_spoken_and_the_session_goes_on(server: Running) -> None:
    with opened(server) as ws:
        say(ws, "🎉👍🏽", FLUSH)
        error = Heard().until(ws, "error").last
        assert (error["param"], error["code"]) == ("input", "empty_input")
        say(ws, "\x00\x1b", FLUSH)
        assert Heard().until(ws, "error").last["param"] == "input"
        say(ws, "x" * 30_000)  # fails before its flush: what follows is not lost
        assert Heard().until(ws, "error").last["code"] == "string_above_max_length"
        say(ws, "Fine.", END)
        assert Heard().until(ws).last["type"] == "done" and said(server) == ["fine."]


def test_too_much_text(server: Running) -> None:
    server.engine.step_s = 0.05
    with opened(server) as ws:
        for _ in range(11):
            say(ws, "Hello there, my friend. " * 400)
        error = Heard().until(ws).last
    assert (error["type"], error["param"]) == ("error", "text") and ws.protocol.close_code == 1003
    server.wait(lambda engine: not engine.live, "it is aborted")


def test_text_after_the_end(server: Running) -> None:
    server.engine.first_s = 0.5
    with opened(server) as ws:
        say(ws, "Hello.", END, "More.")
        heard = Heard().until(ws)
    assert heard.last["message"] == "text after the end" and ws.protocol.close_code == 1003


def test_a_failing_engine_is_told(server: Running) -> None:
    server.engine.submit_error = EngineDead("the engine ended")
    with opened(server) as ws:
        say(ws, "Hello.", FLUSH)
        assert Heard().until(ws).last["code"] == "engine_dead" and ws.protocol.close_code == 1011
    server.engine.submit_error = None
    server.engine.alive = False
    with opened(server) as ws:
        assert Heard().until(ws).last["code"] == "engine_dead" and ws.protocol.close_code == 1011


# ------------------------------------------------------------------------------------------------- silence and leaving


def test_half_sent_text_then_silence(start_server: Callable[..., Running]) -> None:
    server = start_server(session_idle_s=0.5)
    with opened(server) as ws:
        say(ws, "Hello there. And then")
        heard = Heard().until(ws)
    assert ws.protocol.close_code == 1001 and said(server) == ["hello there."] and heard.frames
    server.wait(lambda engine: not engine.live, "nothing is left")


def test_who_listens_needs_to_say_nothing(start_server: Callable[..., Running]) -> None:
    server = start_server(session_idle_s=0.5)
    server.engine.step_s = 0.1
    with opened(server) as ws:
        say(ws, "Hello there, my dear old friend. " * 5, FLUSH)
        started = time.monotonic()
        Heard().until(ws, "flushed")
        assert time.monotonic() - started > 0.6
        say(ws, END)
        assert Heard().until(ws).last["type"] == "done"


def test_a_peer_that_never_reads(start_server: Callable[..., Running]) -> None:
    server = start_server(write_timeout_s=0.6)
    stuck = open_websocket(server.port, PATH, receive_buffer=4096)
    text = json.dumps({"type": "text", "text": "Hello there, my dear old friend. " * 500})
    for _ in range(5):  # an hour of speech
        stuck.sendall(frame(text.encode(), 1))
    server.wait(lambda engine: bool(engine.live), "it speaks")
    server.wait(lambda engine: not engine.live, "the session ends", 10)
    (voice,) = server.engine.voices.values()
    assert voice.audio_s < 180  # the socket's buffers, the session's, and AHEAD_S
    stuck.close()


def test_clients_that_vanish_leave_nothing_behind(server: Running) -> None:
    server.engine.step_s = 0.01
    text = json.dumps({"type": "text", "text": "Hello there, my dear old friend. " * 30}).encode()
    for index in range(200):
        client = open_websocket(server.port, PATH)
        client.sendall(frame(text, 1)[: 600 if index % 3 == 1 else None])  # or in the middle of a message
        if index % 3 == 2:
            while len(client.recv(2000)) < 1000:  # or while it is spoken to
                pass
        if index % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST instead of FIN
        client.close()

    async def count() -> int:
        return len(asyncio.all_tasks())

    deadline = time.monotonic() + 5
    while (tasks := asyncio.run_coroutine_threadsafe(count(), server.loop).result(2)) > 12 or server.engine.live:
        assert time.monotonic() < deadline, f"{tasks} tasks are left, {len(server.engine.live)} requests"
        time.sleep(0.02)
    assert len(server.engine.ended) > 60 and all(how.startswith("abort") for how in server.engine.ended.values())
    name = f'motet_websocket_connections_active{{route="{PATH}"}} 0.0'
    assert name in get(server.port, "/metrics").body.decode()


def test_two_streams_beside_a_chat(server: Running) -> None:
    server.engine.step_s = 0.005
    with opened(server) as first, opened(server) as second:
        say(first, "Hello there, my friend. ", "How are you?", END)
        say(second, "Hello there, my friend. ", "How are you?", END)
        chat = server.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
        sounds = [Heard().until(ws).sound for ws in (first, second)]
    assert text == server.engine.reply and sounds[0] == sounds[1] and len(sounds[0]) > RATE


def test_draining_speaks_what_was_sent(start_server: Callable[..., Running]) -> None:
    server = start_server()
    server.engine.step_s = 0.02
    with opened(server) as ws:
        say(ws, "Hello there, my friend. And then")
        heard = Heard().until(ws, "utterance")
        server.stop()
        heard.until(ws)
    assert said(server)[-1].startswith("and then") and heard.of("done") and ws.protocol.close_code == 1012
    assert heard.last["code"] == "draining"


def test_a_plain_request_is_told_to_upgrade(server: Running) -> None:
    assert get(server.port, PATH).error["code"] == "upgrade_required"

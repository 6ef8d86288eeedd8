"""The binary PCM socket, and what holds for every WebSocket: who may come in, limits, misuse, the end."""

from __future__ import annotations

import asyncio
import base64
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
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.sync.client import ClientConnection, connect

from motet.engine.errors import EngineDead
from motet.streaming.live_stream import Encoding, PCMInput

from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_recogniser import RATE, s16, sound
from .raw_http import frame, get, open_websocket

PATH = "/v1/audio/stream"
END = json.dumps({"type": "end"})


@contextmanager
def opened(server: Running, query: str = "", path: str = PATH, **options: Any) -> Iterator[ClientConnection]:
    url = f"ws://127.0.0.1:{server.port}{path}{'?' if query else ''}{query}"
    with connect(url, **{"compression": None, "close_timeout": 2, **options}) as ws:
        yield ws


def events(ws: ClientConnection) -> list[dict[str, Any]]:
    """All that still comes, up to the close."""
    found = []
    try:
        while True:
            found.append(json.loads(ws.recv(timeout=10)))
    except websockets.ConnectionClosed:
        return found


def close_code(ws: ClientConnection) -> int | None:
    return ws.protocol.close_code


def refused(server: Running, query: str = "", path: str = PATH, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of an upgrade that is not granted."""
    with pytest.raises(websockets.InvalidStatus) as info, opened(server, query, path, **options):
        pass
    response = info.value.response
    return response.status_code, json.loads(response.body or b"{}")["error"]


@pytest.mark.parametrize(("encoding", "rate", "piece"), [("s16", 16000, 997), ("f32", 16000, 6001), ("s16", 24000, 3)])
def test_a_stream_in_odd_pieces(server: Running, encoding: str, rate: int, piece: int) -> None:
    with opened(server, f"encoding={encoding}&rate={rate}&partials=500&words=true&language=en-GB") as ws:
        ready = json.loads(ws.recv())
        assert (ready["type"], ready["model"], ready["rate"]) == ("ready", ASR, rate)
        audio = sound(0.5 if piece == 3 else 1.5, silence_s=0.8, rate=rate)
        data = s16(audio) if encoding == "s16" else audio.tobytes()
        for start in range(0, len(data), piece * (100 if piece == 3 else 1)):
            ws.send(data[start : start + piece * (100 if piece == 3 else 1)])
        ws.send(END)
        got = events(ws)
    assert close_code(ws) == 1000
    kinds = [event["type"] for event in got]
    assert kinds[0] == "speech" and kinds[-1] == "done" and "error" not in kinds
    segment = next(event for event in got if event["type"] == "segment")
    assert segment["text"] == (" one" if piece == 3 else " one two three") and segment["words"][0]["word"] == " one"
    assert abs(got[-1]["audio_s"] - len(audio) / rate) < 0.01 and got[-1]["dropped_bytes"] == 0
    committed = "".join(event["committed"] for event in got if event["type"] == "partial")
    assert segment["text"].startswith(committed)
    assert server.engine.audio[0].options.language == "en"


@settings(max_examples=40, deadline=None)
@given(
    encoding=st.sampled_from(["s16", "f32", "ulaw", "alaw"]),
    rate=st.sampled_from([8000, 16000, 24000, 44100]),
    data=st.binary(max_size=4000),
    cuts=st.lists(st.integers(0, 4000), max_size=8),
)
def test_cuts_change_no_sample(encoding: Encoding, rate: int, data: bytes, cuts: list[int]) -> None:
    if encoding == "f32":
        data = (np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype("<f4") / 32768).tobytes()

    def through(pieces: list[bytes]) -> bytes:
        pcm = PCMInput(encoding, rate)
        return b"".join([*(part for piece in pieces for part in pcm.push(piece)), pcm.finish()])

    marks = sorted({0, *(cut % (len(data) + 1) for cut in cuts), len(data)})
    assert through([data[a:b] for a, b in zip(marks, marks[1:], strict=False)]) == through([data])


def test_half_a_sample_at_the_end_is_told(server: Running) -> None:
    with opened(server) as ws:
        ws.send(s16(sound(0.5)) + b"\x01")
        ws.send(END)
        assert events(ws)[-1]["dropped_bytes"] == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("model=nobody", "model"),
        (f"model={MODEL}", "model"),
        ("rate=0", "rate"),
        ("rate=nan", "rate"),
        ("rate=16000.5", "rate"),
        ("encoding=mp3", "encoding"),
        ("language=klingon", "language"),
        ("partials=-1", "partials"),
        ("words=maybe", "words"),
        ("modell=x", "modell"),
    ],
)
def test_bad_queries_are_refused_before_the_upgrade(server: Running, query: str, param: str) -> None:
    status, error = refused(server, query)
    assert status in (400, 404) and error["param"] == param
    assert not server.engine.audio


@pytest.mark.parametrize("message", ["audio", '{"type":"stop"}', "[" * 100_000, ""])
def test_text_where_binary_is_due(server: Running, message: str) -> None:
    with opened(server) as ws:
        ws.send(message)
        got = events(ws)
    assert got[-1]["type"] == "error" and "binary" in got[-1]["message"] and close_code(ws) == 1003
    server.wait(lambda engine: not engine.live, "the stream is aborted")


def test_samples_that_are_no_numbers_and_audio_after_the_end(server: Running) -> None:
    with opened(server, "encoding=f32") as ws:
        ws.send(b"\xff\xff\xff\xff" * 10)
        assert events(ws)[-1]["type"] == "error" and close_code(ws) == 1003
    server.engine.first_s = 0.5
    with opened(server) as ws:
        ws.send(END)
        ws.send(b"\0\0")
        got = events(ws)
        assert got[-1]["message"] == "audio after the end" and close_code(ws) == 1003


def test_a_failing_engine_is_told(server: Running) -> None:
    server.engine.submit_error = EngineDead("the engine ended")
    with opened(server) as ws:
        assert events(ws)[-1]["code"] == "engine_dead" and close_code(ws) == 1011


def test_an_engine_that_cannot_load_is_told(server: Running) -> None:
    server.engine.alive = False
    with opened(server) as ws:
        assert events(ws)[-1]["code"] == "engine_dead" and close_code(ws) == 1011


def test_clients_that_vanish_leave_nothing_behind(server: Running) -> None:
    for index in range(200):
        connection = open_websocket(server.port, PATH)
        connection.sendall(frame(s16(sound(0.3)))[: 9000 if index % 3 else None])  # or in the middle of a frame
        if index % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST instead of FIN
        connection.close()
    server.wait(lambda engine: len(engine.audio) == 200 and not engine.live, "every stream is aborted", 5)

    async def count() -> int:
        return len(asyncio.all_tasks())

    deadline = time.monotonic() + 3
    while (tasks := asyncio.run_coroutine_threadsafe(count(), server.loop).result(2)) > 12:
        assert time.monotonic() < deadline, f"{tasks} tasks are left"
        time.sleep(0.02)
    assert (
        'motet_websocket_connections_active{route="/v1/audio/stream"} 0.0' in get(server.port, "/metrics").body.decode()
    )


def test_twenty_streams_at_once(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(opened(server, "partials=500")) for _ in range(20)]
        for length in range(3):
            for ws in sockets:
                ws.send(s16(sound(0.5 + 0.5 * length, silence_s=0.6)))
        for ws in sockets:
            ws.send(END)
        for ws in sockets:
            got = [event["text"] for event in events(ws) if event["type"] == "segment"]
            assert got == [" one", " one two", " one two three"]


def test_faster_than_real_time_is_slowed_down(start_server: Callable[..., Running]) -> None:
    server = start_server(max_live_ahead_s=1.0)
    server.engine.hold_audio = True
    second = b"\0\0" * RATE
    with opened(server, close_timeout=0.1) as ws:
        ws.socket.settimeout(0.5)
        started = time.monotonic()
        try:
            for _ in range(60):
                ws.send(second)
        except (TimeoutError, websockets.ConnectionClosed):
            pass
        time.sleep(0.5)
        allowed = time.monotonic() - started + 1.0 + 2.0  # one message may be half heard
        assert server.engine.appended / 4 / RATE <= allowed


def test_a_reader_that_does_not_read_is_closed(start_server: Callable[..., Running]) -> None:
    server = start_server(write_timeout_s=0.6)
    stuck = open_websocket(server.port, "/v1/realtime?intent=transcription", receive_buffer=4096)
    audio = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(s16(sound(0.3))).decode()})
    stuck.sendall(frame(audio.encode(), 1))
    server.wait(lambda engine: len(engine.live) == 1, "the stream is there")
    mistakes = frame(b"no event", 1) * 2000  # each is answered
    with contextlib.suppress(OSError):  # it may be closed under our hands
        for _ in range(10):
            stuck.sendall(mistakes)
    server.wait(lambda engine: not engine.live, "the session ends", 8)
    stuck.close()


def test_who_may_come_in(start_server: Callable[..., Running]) -> None:
    server = start_server(api_keys=("hunter2",), cors_origins=("https://app.example",))
    status, error = refused(server)
    assert (status, error["code"]) == (401, "invalid_api_key")
    for options in (
        {"additional_headers": {"authorization": "Bearer nope"}},
        {"subprotocols": ["realtime", "openai-insecure-api-key.nope"]},
    ):
        assert refused(server, **options)[0] == 401
    good = {"additional_headers": {"authorization": "Bearer hunter2"}}
    with opened(server, **good) as ws:
        assert json.loads(ws.recv())["type"] == "ready"
    with opened(server, **good, origin="https://app.example") as ws:
        assert json.loads(ws.recv())["type"] == "ready"
    with opened(server, **good, origin=f"http://127.0.0.1:{server.port}") as ws:
        assert json.loads(ws.recv())["type"] == "ready"
    status, error = refused(server, **good, origin="https://evil.example")
    assert (status, error["code"]) == (403, "origin_not_allowed")
    keys = ["realtime", "openai-insecure-api-key.hunter2"]
    with opened(server, "intent=transcription", "/v1/realtime", subprotocols=keys) as ws:
        assert json.loads(ws.recv())["type"] == "session.created" and ws.subprotocol == "realtime"


def test_unknown_routes_hosts_and_plain_requests(start_server: Callable[..., Running]) -> None:
    server = start_server(allowed_hosts=("127.0.0.1", "localhost"))
    status, error = refused(server, path="/v1/nothing")
    assert (status, error["code"]) == (404, "not_found")
    status, error = refused(server, path="/v1/chat/completions")
    assert status == 404
    reply = get(server.port, PATH)
    assert (reply.status, reply.error["code"]) == (426, "upgrade_required")
    status, error = refused(server, additional_headers={"host": "evil.example"})
    assert (status, error["code"]) in ((400, "host_not_allowed"), (400, "invalid_http"))


def test_the_number_of_sessions_is_bounded(start_server: Callable[..., Running]) -> None:
    server = start_server(max_sessions=2)
    with opened(server) as first, opened(server):
        status, error = refused(server)
        assert (status, error["code"]) == (429, "server_overloaded")
        first.close()
        deadline = time.monotonic() + 2
        while True:
            try:
                with opened(server) as third:
                    assert json.loads(third.recv())["type"] == "ready"
                break
            except websockets.InvalidStatus:
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_age_and_silence_end_a_session(start_server: Callable[..., Running]) -> None:
    server = start_server(session_idle_s=0.3)
    with opened(server) as ws:
        events(ws)
        assert close_code(ws) == 1001 and "heard" in ws.protocol.close_reason
    server = start_server(session_max_s=0.3)
    with opened(server) as ws:
        assert events(ws)[-1]["code"] == "session_expired" and close_code(ws) == 1001


def test_messages_too_large(start_server: Callable[..., Running]) -> None:
    server = start_server(max_socket_message_bytes=1000)
    with opened(server) as ws:
        ws.send(b"\0" * 1001)
        events(ws)
        assert close_code(ws) == 1009
    with opened(server) as ws:
        with contextlib.suppress(websockets.ConnectionClosed):  # the server may close before the last piece is sent
            ws.send([b"\0" * 400] * 5)
        events(ws)
        assert close_code(ws) == 1009


def test_draining_finishes_what_was_said(start_server: Callable[..., Running]) -> None:
    server = start_server()
    with opened(server) as ws:
        ws.recv()
        ws.send(s16(sound(1.0)))
        server.wait(lambda engine: engine.appended >= RATE * 4, "the audio is heard")
        server.stop()
        got = events(ws)
    kinds = [event["type"] for event in got]
    assert "segment" in kinds and "done" in kinds and got[-1]["code"] == "draining" and close_code(ws) == 1012

"""Start, drain and end of a server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from motet.engine.client import EngineClient
from motet.engine.errors import ModelLoadError
from motet.streaming.config import ServerConfig
from motet.streaming.server import serve

from .fake_engine import MODEL
from .raw_http import Reply, connect, ends_within, get, head, post, read_reply

SCRIPT = Path(__file__).with_name("fake_engine.py")
CHATS = "/v1/chat/completions"


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The fake engine's server as a child; ends it if the test has not."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(port), *options],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield child, port
    finally:
        child.kill()
        child.communicate()


def until_ready(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def wait_for(port: int, path: str, status: int, seconds: float = 10.0) -> Reply:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            reply = get(port, path)
        except OSError:
            reply = None
        if reply is not None and reply.status == status:
            return reply
        time.sleep(0.02)
    raise AssertionError(f"{path} did not become {status}")


def start_chat(port: int, *, stream: bool, max_tokens: int) -> socket.socket:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "stream": stream,
            "ignore_eos": True,
            "max_tokens": max_tokens,
        }
    ).encode()
    connection = connect(port, 20)
    connection.sendall(head(CHATS, length=len(body)) + body)
    return connection


def test_one_line_when_ready_and_no_heavy_imports() -> None:
    with process("--load-s", "0.7") as (child, port):
        assert wait_for(port, "/livez", 200).status == 200
        early = get(port, "/readyz")
        assert early.status == 503 and json.loads(early.body)["status"] == "starting"
        refused = post(port, CHATS, {"messages": [{"role": "user", "content": "hi"}]})
        assert (refused.status, refused.error["code"]) == (503, "model_loading") and "retry-after" in refused.headers
        assert until_ready(child) == f"Motet serves 3 models on http://127.0.0.1:{port}\n"
        wait_for(port, "/readyz", 200)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=10)
        assert child.returncode == 0 and out == "heavy modules: []\n" and "Traceback" not in err


def test_sigterm_lets_requests_finish() -> None:
    with process("--step-s", "0.02") as (child, port), ExitStack() as kept:
        until_ready(child)
        running = [kept.enter_context(start_chat(port, stream=index % 2 == 0, max_tokens=50)) for index in range(8)]
        time.sleep(0.3)
        idle = kept.enter_context(connect(port))
        child.send_signal(signal.SIGTERM)
        drained = wait_for(port, "/readyz", 503)
        assert json.loads(drained.body)["status"] == "draining" and drained.headers["connection"] == "close"
        assert get(port, "/livez").status == 200
        refused = post(port, CHATS, {"messages": [{"role": "user", "content": "hi"}]})
        assert (refused.status, refused.error["code"]) == (503, "draining") and "retry-after" in refused.headers
        for index, connection in enumerate(running):
            reply = read_reply(connection)
            assert reply.status == 200 and b"error" not in reply.body
            assert (b"[DONE]" in reply.body) == (index % 2 == 0) and b'"finish_reason":"length"' in reply.body
        assert child.wait(5) == 0 and ends_within(idle, 5)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_ending_at_once_tells_the_clients(numbers: tuple[signal.Signals, ...]) -> None:
    with process("--step-s", "0.02") as (child, port), ExitStack() as kept:
        until_ready(child)
        stream = kept.enter_context(start_chat(port, stream=True, max_tokens=3000))
        whole = kept.enter_context(start_chat(port, stream=False, max_tokens=3000))
        time.sleep(0.3)
        for number in numbers:
            child.send_signal(number)
            time.sleep(0.1)
        frames = read_reply(stream).body.split(b"\n\n")
        assert json.loads(frames[-3][6:])["error"]["code"] == "draining" and frames[-2] == b"data: [DONE]"
        reply = read_reply(whole)
        assert (reply.status, reply.error["code"]) == (503, "draining")
        assert child.wait(5) == 0  # the draining itself would take a minute


def test_the_time_for_draining_is_bounded() -> None:
    with process("--step-s", "0.02", "--shutdown-timeout-s", "0.5") as (child, port):
        until_ready(child)
        with start_chat(port, stream=True, max_tokens=3000) as stream:
            time.sleep(0.2)
            started = time.monotonic()
            child.send_signal(signal.SIGTERM)
            assert b'"draining"' in read_reply(stream).body
        assert child.wait(5) == 0 and time.monotonic() - started > 0.4


def test_a_reader_that_does_not_read_cannot_hold_the_end_up() -> None:
    with process("--shutdown-timeout-s", "0.5", "--reply", "x" * 3000) as (child, port):
        until_ready(child)
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", port))
        body = json.dumps({"prompt": "a", "n": 64, "max_tokens": 3000, "stream": True, "logprobs": 20}).encode()
        stuck.sendall(head("/v1/completions", length=len(body)) + body)
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(8) == 0
        stuck.close()


def test_a_taken_port_is_an_oserror() -> None:
    async def never() -> EngineClient:
        raise AssertionError("the engine must not be started")

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        asyncio.run(serve(ServerConfig(port=taken.getsockname()[1]), never, signals=False))


def test_an_engine_that_cannot_start_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    async def broken() -> EngineClient:
        raise ModelLoadError("weights.gguf: truncated")

    assert asyncio.run(serve(ServerConfig(port=0), broken, signals=False)) == 1
    assert "weights.gguf: truncated" in capsys.readouterr().err


def test_stop_while_the_engine_starts() -> None:
    with process("--load-s", "30") as (child, port):
        wait_for(port, "/livez", 200)
        threading.Timer(0.1, child.send_signal, (signal.SIGINT,)).start()
        assert child.wait(3) == 0

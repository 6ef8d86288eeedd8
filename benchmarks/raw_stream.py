"""An HTTP client that costs nearly nothing: bytes in, bytes counted. For measuring a server rather than its client.

Speaks just enough HTTP/1.1 for streamed answers of our own server on loopback: a request is bytes made beforehand, an
answer is over when the last chunk has come.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_OK = b"HTTP/1.1 200 "
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_CONTENT = re.compile(rb'"(?:content|text)":"[^"]')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
# How long the reader of many streams rests after each round of reading: fewer, larger reads leave the CPU to the server.
_REST_S = 0.005


class StreamError(Exception):
    """The server's answer was not a stream that ended well; the message holds its beginning."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Several streams read together. `cpu_s`: of this whole process meanwhile."""

    seconds: float
    num_tokens: int  # as the server's usage tells
    num_events: int
    cpu_s: float


def connect(port: int, *, timeout_s: float = 60.0) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def post(path: str, body: dict[str, Any]) -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


def ask(connection: socket.socket, request: bytes) -> dict[str, Any]:
    """The JSON of an answer with a content-length."""
    connection.sendall(request)
    answer = b""
    while True:
        head, found, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower()) if found else None
        if length is not None and len(body) >= int(length[1]):
            break
        if not (data := connection.recv(1 << 16)):
            raise StreamError(f"the server closed the connection: {answer[:200]!r}")
        answer += data
    if b" 200 " not in head[:20]:
        raise StreamError(f"{answer[:500]!r}")
    value = json.loads(body)
    assert isinstance(value, dict)
    return value


def first_text_s(connection: socket.socket, request: bytes) -> float:
    """Seconds from sending a streaming request to the first text; reads on to the end of the answer."""
    answer = b""
    first_s = 0.0
    began = time.perf_counter()
    connection.sendall(request)
    while not answer.endswith(_END):
        data = connection.recv(1 << 16)
        now = time.perf_counter()
        if not data:
            raise StreamError(f"the server closed the connection: {answer[-500:]!r}")
        answer += data
        if not first_s and _CONTENT.search(answer):
            first_s = now - began
        _check_head(answer)
    if not first_s:
        raise StreamError(f"an answer without text: {answer[:500]!r}")
    return first_s


def read_streams(port: int, requests: Sequence[bytes], *, timeout_s: float = 180.0) -> Streams:
    """Send all requests, each on its own connection, and read all streams to their ends in this one thread."""
    connections = [connect(port) for _ in requests]
    bodies = [bytearray() for _ in requests]
    selector = selectors.DefaultSelector()
    try:
        cpu = time.process_time()
        began = time.perf_counter()
        for connection, request, body in zip(connections, requests, bodies):
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, (connection, body))
        num_open = len(connections)
        while num_open:
            ready = selector.select(max(0.0, began + timeout_s - time.perf_counter()))
            if not ready:
                raise StreamError(f"{num_open} streams did not end within {timeout_s:.0f} s")
            for key, _ in ready:
                connection, body = key.data
                data = connection.recv(1 << 18)
                body += data
                if body.endswith(_END):
                    selector.unregister(connection)
                    num_open -= 1
                elif not data or not body.startswith(_OK[: len(body)]):
                    raise StreamError(f"{bytes(body[-500:])!r}")
            if num_open:
                time.sleep(_REST_S)
        seconds = time.perf_counter() - began
        cpu_s = time.process_time() - cpu
    finally:
        selector.close()
        for connection in connections:
            connection.close()
    usages = [_COMPLETION_TOKENS.findall(body) for body in bodies]
    if not all(usages):
        raise StreamError(f"a stream without its usage: {bytes(bodies[0][-500:])!r}")
    return Streams(
        seconds=seconds,
        num_tokens=sum(int(usage[-1]) for usage in usages),
        num_events=sum(body.count(b"data: {") for body in bodies),
        cpu_s=cpu_s,
    )


def _check_head(answer: bytes) -> None:
    if len(answer) > 15 and not answer.startswith(b"HTTP/1.1 200 "):
        raise StreamError(f"{answer[:500]!r}")

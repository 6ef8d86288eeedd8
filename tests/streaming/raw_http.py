"""HTTP spoken by hand over a socket, to say what well-behaved clients never would."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The envelope, checked for its shape."""
        assert self.headers["content-type"] == "application/json", self
        error = json.loads(self.body)["error"]
        assert isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and isinstance(error["code"], str)
        return error


def connect(port: int, timeout_s: float = 10.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def head(path: str, method: str = "POST", *, length: int | None = None, **headers: str) -> bytes:
    """A request head for JSON; header names with "_" for "-"."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = {"host": "localhost", "content-type": "application/json", **given}
    if length is not None:
        lines["content-length"] = str(length)
    return (
        f"{method} {path} HTTP/1.1\r\n".encode()
        + b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in lines.items())
        + b"\r\n"
    )


def read_reply(connection: socket.socket) -> Reply:
    """One response: by content-length, by chunks, or to the end of the connection."""
    stream = connection.makefile("rb")
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return Reply(status, headers, stream.read(int(headers["content-length"])))
    body = b""
    while headers.get("transfer-encoding") == "chunked" and (size := int(stream.readline() or b"0", 16)):
        body += stream.read(size)
        stream.readline()
    return Reply(status, headers, body)


def send(port: int, data: bytes) -> Reply:
    with connect(port) as connection:
        connection.sendall(data)
        return read_reply(connection)


def post(port: int, path: str, body: object, **headers: str) -> Reply:
    """POST `body`: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(port, head(path, length=len(data), **headers) + data)


def get(port: int, path: str, **headers: str) -> Reply:
    return send(port, head(path, "GET", **headers))


def ends_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the peer closes the connection in time."""
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    try:
        while time.monotonic() < deadline:
            if connection.recv(65536) == b"":
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def open_websocket(port: int, path: str, *, receive_buffer: int = 0) -> socket.socket:
    """A WebSocket of which only the handshake is done; the rest is up to the test."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    upgrade = {"upgrade": "websocket", "connection": "Upgrade", "sec_websocket_version": "13"}
    connection.sendall(head(path, "GET", sec_websocket_key="AAAAAAAAAAAAAAAAAAAAAA==", **upgrade))
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1)
    assert answer.startswith(b"HTTP/1.1 101 "), answer
    return connection


def frame(data: bytes, opcode: int = 2, *, fin: bool = True) -> bytes:
    """A client's frame, masked with zeros."""
    first = bytes([opcode | (0x80 if fin else 0)])
    if len(data) < 126:
        return first + bytes([0x80 | len(data)]) + bytes(4) + data
    if len(data) < 65536:
        return first + b"\xfe" + len(data).to_bytes(2, "big") + bytes(4) + data
    return first + b"\xff" + len(data).to_bytes(8, "big") + bytes(4) + data

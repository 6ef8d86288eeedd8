"""A small HTTP/1.1 client for load tests: streamed completions of any OpenAI-compatible server, with arrival times.

Built on asyncio and httptools, because a load generator must cost little beside the server it measures: it parses nothing
twice and keeps connections. Knows nothing of loads and reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httptools

from .. import __version__

T = TypeVar("T")
_MAX_BODY = 4 << 20  # of an answer that is no stream


class HttpError(Exception):
    """A request that gave no good answer. `code`: the HTTP status, or connection, timeout, incomplete, stream, protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True)
class Streamed:
    """A streamed completion as its reader saw it. Times on `time.perf_counter`'s clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of chunks with text
    ended: float = 0.0
    num_prompt_tokens: int | None = None  # as the server's usage tells; None when it does not
    num_output_tokens: int | None = None


class BenchClient:
    """Requests to one server. Use as an async context manager; any number of requests at the same time."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        """`url`: http(s)://host[:port][/path], with or without the `/v1` at its end. Raises ValueError for any other."""
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        plain = parts.scheme in ("http", "https") and not (parts.query or parts.fragment or "@" in parts.netloc)
        if not plain or not parts.hostname or port == -1:
            raise ValueError(f"expected a URL like http://127.0.0.1:8000, got {url!r}")
        if "\r" in url or "\n" in url or not api_key.isascii() or not api_key.isprintable():
            raise ValueError("a URL and an API key are one line of ASCII")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"
        self._head = f"Host: {parts.netloc}\r\nUser-Agent: motet-bench/{__version__}\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> BenchClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._idle:
            self._idle.pop().close()

    async def models(self) -> list[str]:
        """Ids of the models that the server names. Raises HttpError."""
        body = await self._within(self._get("/models"))
        try:
            return [str(entry["id"]) for entry in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise HttpError("protocol", f"{self.url}/models is no list of models: {body[:120]!r}") from None

    async def complete(self, body: dict[str, Any]) -> Streamed:
        """Send a streaming completion and read it to its end. Raises HttpError."""
        return await self._within(self._complete(json.dumps(body).encode()))

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            raise HttpError("timeout", f"no end within {self._timeout_s:g} s") from None

    async def _get(self, path: str) -> bytes:
        request = f"GET {self._base}{path} HTTP/1.1\r\n{self._head}\r\n".encode()
        async with self._answer(request) as connection:
            while await connection.more():
                pass
            return connection.whole()

    async def _complete(self, body: bytes) -> Streamed:
        head = f"POST {self._base}/completions HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        streamed = Streamed(sent=time.perf_counter())
        done = False
        async with self._answer(request) as connection:
            while await connection.more():
                now = time.perf_counter()
                for data in connection.events():
                    done = done or data == b"[DONE]"
                    if not done and _read_event(data, streamed):
                        streamed.arrivals.append(now)
            connection.whole()  # raises for an answer that is no stream
            streamed.ended = time.perf_counter()
        if not done:
            raise HttpError("incomplete", "the stream ended without [DONE]")
        return streamed

    @contextlib.asynccontextmanager
    async def _answer(self, request: bytes) -> AsyncIterator[_Connection]:
        """A connection on which the request is sent; it is kept when its answer was read to the end."""
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            try:
                await connection.send(request)
            except HttpError as error:  # the server may have closed what it had kept
                connection.close()
                if not connection.was_kept or error.code != "connection":
                    raise
                connection = await self._connect()
                await connection.send(request)
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=1 << 20)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error)
            raise HttpError("connection", f"cannot connect to {self._host}:{self._port}: {reason}") from None
        return _Connection(reader, writer)


class _Connection:
    """One connection and the answer that is being read from it; a callback object for httptools."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.was_kept = False
        self.reusable = False
        self._first = b""

    async def send(self, request: bytes) -> None:
        """Send a request and wait for the first bytes of its answer. Raises HttpError."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._complete = False
        self._ends_by_closing = True  # until a header says how long the body is
        self.was_kept, self.reusable = self.reusable, False
        try:
            self._writer.write(request)
            await self._writer.drain()
            self._first = await self._reader.read(1 << 16)
        except OSError as error:
            raise HttpError("connection", f"the connection broke: {error.strerror or error}") from None
        if not self._first:
            raise HttpError("connection", "the server closed the connection without an answer")

    async def more(self) -> bool:
        """Read on; False once the answer is complete. Raises HttpError when it breaks off."""
        if self._complete:
            return False
        data, self._first = self._first, b""
        if not data:
            try:
                data = await self._reader.read(1 << 16)
            except OSError as error:
                raise HttpError("incomplete", f"the connection broke: {error.strerror or error}") from None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise HttpError("protocol", f"the answer is not HTTP/1.1: {error}") from None
        if not data and not self._complete:
            if self._ends_by_closing and self._parser.get_status_code():
                self._complete = True
                return True
            raise HttpError("incomplete", "the server closed the connection in the middle of an answer")
        if len(self._body) > _MAX_BODY:
            raise HttpError("protocol", f"more than {_MAX_BODY >> 20} MiB without an event")
        return True

    def events(self) -> list[bytes]:
        """Data of the server-sent events that have come whole; nothing for an answer that is an error."""
        if self._parser.get_status_code() != 200:
            return []
        *lines, rest = bytes(self._body).split(b"\n")
        self._body = bytearray(rest)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def whole(self) -> bytes:
        """What is left of the answer's body. Raises HttpError for a status other than 200."""
        status = self._parser.get_status_code()
        if status != 200:
            raise HttpError(str(status), _said(bytes(self._body)))
        return bytes(self._body)

    def close(self) -> None:
        self._writer.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_by_closing = False

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete = True
        self.reusable = bool(self._parser.should_keep_alive())


def _read_event(data: bytes, streamed: Streamed) -> bool:
    """Take one chunk of a completion; says whether it brought text. Raises HttpError for an error in the stream."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise HttpError("protocol", f"an event that is no JSON: {data[:120]!r}") from None
    if not isinstance(chunk, dict):
        raise HttpError("protocol", f"an event that is no object: {data[:120]!r}")
    if isinstance(error := chunk.get("error"), dict):
        raise HttpError("stream", str(error.get("message", error))[:300])
    if isinstance(usage := chunk.get("usage"), dict):
        streamed.num_prompt_tokens = usage.get("prompt_tokens")
        streamed.num_output_tokens = usage.get("completion_tokens")
    choices = chunk.get("choices") or ()
    return any(isinstance(choice, dict) and choice.get("text") for choice in choices)


def _said(body: bytes) -> str:
    """The message in an error's body, or its beginning."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, AttributeError):
        return body[:200].decode(errors="replace").strip() or "no message"

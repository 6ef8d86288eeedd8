"""An OpenAI-like server of completions for tests of load generators: raw sockets, so that it can misbehave."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any


class FakeCompletions:
    """Streams `max_tokens` chunks of a word each. `script` maps a request's number to how it goes wrong.

    "429": a status with OpenAI's error body; "cut": the connection ends in the middle; "error": an error event in the
    stream; "hang": headers and nothing more; "drop": closed without an answer; "plain": not a stream.
    """

    def __init__(self, script: dict[int, str] | None = None, *, usage: bool = True, step_s: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = 0
        self.most_at_once = 0
        self.tokens_per_chunk = 1
        self._script = script or {}
        self._usage = usage
        self._step_s = step_s
        self._running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-completions")
        self._started = threading.Event()

    def __enter__(self) -> FakeCompletions:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._over.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET /v1/models "):
            self._whole(writer, 200, {"data": [{"id": "first"}, {"id": "second"}]})
            return True
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        how = self._script.get(len(self.bodies), "")
        self.bodies.append(body)
        if how == "drop":
            return False
        if how.isdigit():
            self._whole(writer, int(how), {"error": {"message": "too much of it", "code": "overloaded"}})
            return True
        if how == "plain":
            self._whole(writer, 200, {"choices": [{"text": "all at once"}]})
            return True
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await self._stream(writer, body, how)
        finally:
            self._running -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], how: str) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if how == "hang":
            await asyncio.sleep(60)
        for index in range(body["max_tokens"] // self.tokens_per_chunk):
            await asyncio.sleep(self._step_s)
            if how and index == 1:
                if how == "error":
                    self._event(writer, {"error": {"message": "the engine ended"}})
                return False
            self._event(writer, {"choices": [{"index": 0, "text": "word "}]})
        if self._usage:
            prompt = body["prompt"]
            num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
            self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

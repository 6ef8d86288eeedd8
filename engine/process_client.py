"""The host in a child process: the server's client. Restarts the child when it dies. Torch-free.

A crash of the child fails the requests that it held, each with one clear error, and nobody else's: the next ones wait for
the new child, which loads again what was loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from .client import HostClient
from .config import HostConfig
from .errors import EngineDead, Unavailable
from .frames import Call, Events, FrameReader, FromHost, Progress, Reply, ToHost, from_host_decoder, pack
from .types import EmbeddingSpan, ModelInfo

_RESTART_DELAYS_S = (0.0, 0.5, 2.0, 5.0, 10.0)


class ProcessClient(HostClient):
    """Make it with `await ProcessClient.start(config)`. Used from one event loop."""

    def __init__(self, config: HostConfig, *, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._config = config
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._up = asyncio.Event()
        self._writable = asyncio.Event()  # cleared while the socket does not take what we write
        self._writable.set()
        self._closing = False
        self._loaded: dict[str, None] = {}
        self._restart: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._num_quick_deaths = 0

    @classmethod
    async def start(cls, config: HostConfig, *, environment: Mapping[str, str] | None = None) -> ProcessClient:
        """Start the child and return once it listens (models load at first use, or at once with `preload`)."""
        client = cls(config, environment=environment)
        await client._spawn()
        return client

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while it is being restarted."""
        return self._process.pid if self._process is not None and self._up.is_set() else None

    async def load(self, model: str) -> ModelInfo:
        info = await super().load(model)
        self._loaded[model] = None
        return info

    async def unload(self, model: str) -> None:
        await super().unload(model)
        self._loaded.pop(model, None)

    async def close(self) -> None:
        self._closing = self._draining = True
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart
        if self._transport is not None:
            self._transport.close()  # the child ends when its socket does
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, 5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        self._lose(Unavailable("this client was closed", code="draining"))

    async def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        """Returns when there is room for more: a file of any length is never all in this process."""
        await super().append(request_id, token_ids, embeddings=embeddings, pcm=pcm, last=last)
        await self._writable.wait()

    # --------------------------------------------------------------------------------------------- transport

    async def _reach(self) -> None:
        if self._up.is_set():
            return
        if self._closing:
            raise Unavailable("the server is shutting down", code="draining")
        try:
            await asyncio.wait_for(self._up.wait(), self._config.start_timeout_s)
        except TimeoutError:
            raise EngineDead("the engine is not running", retry_after_s=5.0) from None

    def _post(self, message: ToHost) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def _is_alive(self) -> bool:
        return self._up.is_set()

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self._environment}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "motet.engine.host_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        self._started_at = loop.time()
        transport, wire = await loop.create_connection(lambda: _Wire(self), sock=ours)
        self._transport = transport
        transport.write(pack(self._config))
        try:
            await asyncio.wait_for(wire.hello, self._config.start_timeout_s)
        except (TimeoutError, EngineDead):
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
            raise EngineDead(f"the engine process did not start (exit code {code})") from None
        self._up.set()
        for model in self._loaded:
            self._num_calls += 1  # nobody waits for the answer
            self._post(Call(self._num_calls, "load", {"model": model}))

    def _hear(self, message: FromHost) -> None:
        match message:
            case Events():
                self._receive(message.events)
            case Reply():
                self._answer(message)
            case Progress():
                if self.on_progress is not None:
                    self.on_progress(message)

    def _lost(self) -> None:
        """The child's socket has closed."""
        was_up = self._up.is_set()
        self._up.clear()
        self._writable.set()
        self._transport = None
        self._lose(EngineDead("the engine process ended; it is being restarted", retry_after_s=2.0))
        if was_up and not self._closing:
            self._restart = asyncio.get_running_loop().create_task(self._bring_back())

    async def _bring_back(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        quick = loop.time() - self._started_at < 30.0
        self._num_quick_deaths = self._num_quick_deaths + 1 if quick else 0
        while not self._closing:
            # The first restart is immediate; a child that dies again and again is not started in a tight loop.
            await asyncio.sleep(_RESTART_DELAYS_S[min(max(0, self._num_quick_deaths - 1), len(_RESTART_DELAYS_S) - 1)])
            self.num_restarts += 1
            try:
                await self._spawn()
                return
            except EngineDead:
                self._num_quick_deaths += 1


class _Wire(asyncio.Protocol):
    """The parent's end of the socket."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._reader = FrameReader()
        self.hello: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def pause_writing(self) -> None:
        self._client._writable.clear()

    def resume_writing(self) -> None:
        self._client._writable.set()

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            if not self.hello.done():
                self.hello.set_result(msgspec.msgpack.decode(body))
            else:
                self._client._hear(from_host_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.hello.done():
            self.hello.set_exception(EngineDead("the engine process ended while starting"))
        self._client._lost()

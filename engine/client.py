"""How pipelines and routes talk to engines: one protocol, several kinds of client. Torch-free.

`EngineClient` is all that the floors above know of the engine. `InlineClient` runs the host in a thread of this process
(the SDK); `ProcessClient` (process_client.py) runs it in a child process (the server, which never imports torch).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from .config import HostConfig
from .errors import DuplicateRequest, EngineDead, MotetError, Unavailable, from_info
from .frames import Abort, Append, Call, Progress, Reply, Submit, ToHost, Update
from .host import BuildEngine, EngineHost
from .threads import prepare_threads
from .types import TERMINAL, Aborted, AnyEvent, AnyRequest, Audio, Denoising, EmbeddingSpan, Failed, ModelInfo, Tokens

OnProgress = Callable[[Progress], None]


class EngineClient(Protocol):
    """Submit requests, receive events. Every request ends in exactly one terminal event (Done, Aborted, Failed)."""

    def submit(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        """Start a request; iterate its events. Leaving the iterator early (aclose, cancel) aborts the request.

        Consecutive Tokens events are merged when the reader is slower than the engine. Errors arrive as a Failed event,
        never as an exception.
        """
        ...

    async def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None: ...

    async def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None: ...

    async def abort(self, request_id: str, reason: str = "client") -> None: ...

    async def load(self, model: str) -> ModelInfo:
        """Make sure the model is loaded (first use loads it) and describe it. Raises MotetError."""
        ...

    async def unload(self, model: str) -> None: ...

    async def stats(self) -> dict[str, Any]: ...

    async def health(self) -> dict[str, Any]:
        """{"alive": bool, "ready": bool, "models": {id: state}, "restarts": int}"""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait until the running ones ended or the time is up, then abort the rest ("shutdown")."""
        ...

    async def close(self) -> None: ...


class Mailbox:
    """One request's events on the reader's side. Text is never too much: consecutive Tokens merge, and max_tokens bounds
    them. Audio is: with more than `MAX_AUDIO_BYTES` of it unread the mailbox is `overrun` and takes no more. Of previews the
    newest of each picture is kept, the others lose their pixels."""

    MAX_AUDIO_BYTES = 120 * 48_000  # 120 s at 24 kHz, 16 bit

    __slots__ = ("_audio_bytes", "_events", "_previews", "_wake", "ended", "overrun", "sent")

    def __init__(self) -> None:
        self._events: list[AnyEvent] = []
        self._wake = asyncio.Event()
        self._audio_bytes = 0  # unread
        self._previews: dict[int, Denoising] = {}  # unread, by picture
        self.overrun = False
        self.sent = asyncio.Event()  # the request is on its way, or has ended before
        self.ended = False  # its terminal event has come

    def put(self, event: AnyEvent) -> None:
        """Add an event; whatever follows the terminal one is dropped."""
        if self.ended:
            return
        if isinstance(event, TERMINAL):
            self.ended = True
            self.sent.set()
        if isinstance(event, Audio):
            self.overrun = self.overrun or self._audio_bytes + len(event.pcm) > self.MAX_AUDIO_BYTES
            if self.overrun:
                return
            self._audio_bytes += len(event.pcm)
        if isinstance(event, Denoising) and event.preview is not None:
            older = self._previews.get(event.index)
            if older is not None:
                older.preview = None
            self._previews[event.index] = event
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            last.token_ids.extend(event.token_ids)
            if event.logprobs is not None:
                last.logprobs = [*(last.logprobs or []), *event.logprobs]
            if event.side_ids is not None:
                last.side_ids = [*(last.side_ids or []), *event.side_ids]
            last.seq = event.seq
        else:
            self._events.append(event)
        self._wake.set()

    async def take(self) -> list[AnyEvent]:
        """All events that have come, at least one."""
        while not self._events:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        self._audio_bytes = 0
        self._previews = {}
        return events


class HostClient(ABC):
    """What all clients of a host share: mailboxes, calls, draining. Kinds differ in how a message reaches the host."""

    _EARLY_ABORTS = 1024

    def __init__(self) -> None:
        self._mailboxes: dict[str, Mailbox] = {}
        self._early_aborts: OrderedDict[str, str] = OrderedDict()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._infos: dict[str, ModelInfo] = {}  # what loaded models said of themselves
        self._num_calls = 0
        self._draining = False
        self._quiet = asyncio.Event()
        self.num_restarts = 0
        self.on_progress: OnProgress | None = None

    # How a message goes out; `_reach` waits until there is somebody to receive it.

    @abstractmethod
    async def _reach(self) -> None:
        """Return once the host can be reached. Raises Unavailable or EngineDead when that takes too long."""

    @abstractmethod
    def _post(self, message: ToHost) -> None:
        """Send a message; drops it when the host is gone (its requests are failed then anyway)."""

    @abstractmethod
    def _is_alive(self) -> bool: ...

    @property
    def num_requests(self) -> int:
        """Requests without a terminal event yet."""
        return len(self._mailboxes)

    async def submit(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        request_id = request.request_id
        if request_id in self._mailboxes:
            error = DuplicateRequest("request_id: this id is already running", param="request_id")
            yield Failed(request_id=request_id, error=error.info())
            return
        if (reason := self._early_aborts.pop(request_id, None)) is not None:
            yield Aborted(request_id=request_id, reason=reason)
            return
        if self._draining:
            refusal = Unavailable("the server is shutting down", code="draining", retry_after_s=5.0)
            yield Failed(request_id=request_id, error=refusal.info())
            return
        mailbox = self._mailboxes[request_id] = Mailbox()
        sent = False
        try:
            try:
                await self._reach()
            except MotetError as error:
                mailbox.put(Failed(request_id=request_id, error=error.info()))
            if not mailbox.ended:  # it may have been aborted meanwhile
                self._post(Submit(request))
                sent = True
                mailbox.sent.set()
            while True:
                for event in await mailbox.take():
                    yield event
                    if isinstance(event, TERMINAL):
                        return
        finally:
            if sent and not mailbox.ended:
                self._post(Abort(request_id, "disconnect"))
            self._mailboxes.pop(request_id, None)
            if not self._mailboxes:
                self._quiet.set()

    async def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        if (mailbox := self._mailboxes.get(request_id)) is not None:
            await mailbox.sent.wait()  # while the host is being restarted, nothing of an input may get lost
        self._post(Append(request_id, token_ids, embeddings or [], last, pcm))

    async def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None:
        self._post(Update(request_id, priority, deadline))

    async def abort(self, request_id: str, reason: str = "client") -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None:
            # Not here yet, or over. If it still comes, it ends at once.
            self._early_aborts[request_id] = reason
            while len(self._early_aborts) > self._EARLY_ABORTS:
                self._early_aborts.popitem(last=False)
            return
        if not self._is_alive():
            mailbox.put(Aborted(request_id=request_id, reason=reason))
        self._post(Abort(request_id, reason))

    async def load(self, model: str) -> ModelInfo:
        info = self._infos.get(model)  # asked for at every request: the host would answer only between two steps
        if info is None:
            value = await self._call("load", model=model)
            info = value if isinstance(value, ModelInfo) else msgspec.convert(value, ModelInfo)
            self._infos[model] = info
        return info

    async def unload(self, model: str) -> None:
        self._infos.pop(model, None)
        await self._call("unload", model=model)

    async def stats(self) -> dict[str, Any]:
        return dict(await self._call("stats"))

    async def health(self) -> dict[str, Any]:
        alive = self._is_alive()
        models: dict[str, str] = {}
        if alive:
            models = (await self._call("health"))["models"]
        return {"alive": alive, "ready": alive and not self._draining, "models": models, "restarts": self.num_restarts}

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        self._quiet.clear()
        if self._mailboxes:
            try:
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
            except TimeoutError:
                for request_id in list(self._mailboxes):
                    await self.abort(request_id, "shutdown")

    # ---------------------------------------------------------------------------------------- from the host

    def _receive(self, events: list[AnyEvent]) -> None:
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is None:
                continue
            was_overrun = mailbox.overrun
            mailbox.put(event)
            if mailbox.overrun and not was_overrun:
                self._post(Abort(event.request_id, "slow_reader"))

    def _answer(self, reply: Reply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(from_info(reply.error))
        else:
            future.set_result(reply.value)

    def _lose(self, error: MotetError) -> None:
        """The host is gone: end everything that waits for it."""
        info = error.info()
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(Failed(request_id=request_id, error=info))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self._infos.clear()

    async def _call(self, verb: str, **arguments: Any) -> Any:
        await self._reach()
        self._num_calls += 1
        call_id = self._num_calls
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._post(Call(call_id, verb, arguments))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)


class InlineClient(HostClient):
    """The host in a thread of this process. Used from one event loop: the one of its first call."""

    def __init__(self, config: HostConfig, *, build: BuildEngine | None = None) -> None:
        super().__init__()
        if build is None:
            prepare_threads(config.threads)
            from .load import build_engine  # imports torch

            build = build_engine
        self._host = EngineHost(config, build=build)
        self._peer = _LoopPeer(self)
        self._host.start()

    async def close(self) -> None:
        self._draining = True
        try:
            await asyncio.to_thread(self._host.stop)
        except RuntimeError:  # at the interpreter's end there are no worker threads any more
            self._host.stop()
        self._lose(Unavailable("this client was closed"))

    async def _reach(self) -> None:
        self._peer.bind(asyncio.get_running_loop())
        if not self._host.alive:
            raise EngineDead("the engine's thread has ended", retry_after_s=None)

    def _post(self, message: ToHost) -> None:
        self._host.post(message, self._peer)

    def _is_alive(self) -> bool:
        return self._host.alive


class _LoopPeer:
    """Hands what the host's thread says to the client's event loop: one wake-up a step."""

    def __init__(self, client: InlineClient) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this client belongs to another event loop; make one client per loop")

    def deliver(self, events: list[AnyEvent]) -> None:
        self._hand_over(self._client._receive, events)

    def send(self, message: Reply | Progress) -> None:
        if isinstance(message, Reply):
            self._hand_over(self._client._answer, message)
        elif self._client.on_progress is not None:
            self._hand_over(self._client.on_progress, message)

    def _hand_over(self, receive: Callable[[Any], None], what: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(receive, what)
        except RuntimeError:  # the loop was closed under us: nobody is left to tell
            pass

"""The engine host: one device, one loop thread, one or more engines under an arbiter.

Others post work to the loop from any thread; events leave through the poster's `deliver`, all of one step together. Models
are loaded in a thread of their own, so that a load never stops another model's stream (Python permitting). A step that
raises ends the requests in it; a loop that raises ends the host.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .arbiter import DeviceArbiter, Voice
from .config import HostConfig
from .errors import InternalError, InvalidRequest, ModelNotFound, MotetError, to_info
from .frames import Abort, Append, Call, Progress, Reply, Submit, ToHost, Update
from .types import TERMINAL, Aborted, AnyEvent, EmbeddingSpan, Failed, ModelInfo


class Engine(Voice, Protocol):
    """What a host asks of an engine. Only the host's loop calls it."""

    info: ModelInfo
    kind: str

    def submit(self, request: Any) -> None:
        """Raises InvalidRequest, also for a kind of request that is another engine's."""
        ...

    def append(
        self, request_id: str, token_ids: list[int], *, embeddings: list[EmbeddingSpan] | None, pcm: bytes, last: bool
    ) -> None: ...
    def update(self, request_id: str, *, priority: int | None, deadline: float | None) -> None: ...
    def abort(self, request_id: str, reason: str) -> list[AnyEvent]: ...
    def step(self, slack_s: float | None = None) -> list[AnyEvent]: ...
    def next_timer(self) -> float | None: ...
    def num_requests(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Peer(Protocol):
    """One client's end of the wire, as the loop sees it. Must not block and must not raise."""

    def deliver(self, events: list[AnyEvent]) -> None: ...
    def send(self, message: Reply | Progress) -> None: ...


BuildEngine = Callable[[str, HostConfig, Callable[[str], None]], Engine]


class EngineHost:
    """Owns the engines and the loop. `build` loads a model: (name, config, report_phase) -> Engine."""

    def __init__(self, config: HostConfig, *, build: BuildEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._build = build
        self._clock = clock
        self._arbiter = DeviceArbiter()
        self._engines: dict[str, Engine] = {}
        self._last_used: dict[str, float] = {}
        self._device_s: dict[str, float] = {}  # of each model's steps, ever
        self._loading: dict[str, list[tuple[Peer, Submit | Call]]] = {}
        self._requests: dict[str, tuple[Peer, str]] = {}  # request id -> (its client, its model)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="motet-host", daemon=True)
        self.failure: BaseException | None = None

    # ------------------------------------------------------------------------------------- from any thread

    def start(self) -> None:
        self._thread.start()
        if self.config.preload:
            for model in self.config.served_model_name or self.config.models:
                self._post(lambda model=model: self._load(model))  # type: ignore[misc]

    def post(self, message: ToHost, peer: Peer) -> None:
        """Hand a client's message to the loop."""
        self._post(lambda: self._handle(message, peer))

    def disconnect(self, peer: Peer) -> None:
        """A client is gone: abort what it left."""
        self._post(lambda: self._disconnect(peer))

    def stop(self, timeout_s: float = 5.0) -> None:
        """Abort everything ("shutdown"), close the engines, end the loop."""
        self._post(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._wake.set()

    # ------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # our own fault: tell everybody, then end
            self.failure = error
            self._fail_all(error)
            raise
        finally:
            for engine in self._engines.values():
                engine.close()

    def _turn(self) -> None:
        """One turn: what was posted, one step of one engine, or a wait."""
        while self._inbox:
            self._inbox.popleft()()
        now = self._clock()
        choice = self._arbiter.choose(dict(self._engines), now)
        if choice is None:
            self._idle(now)
            return
        self._step(choice.name, choice.slack_s)

    def _step(self, name: str, slack_s: float | None) -> None:
        started = self._clock()
        events = self._engines[name].step(slack_s)
        ended = self._clock()
        self._arbiter.charge(name, ended - started)
        self._device_s[name] = self._device_s.get(name, 0.0) + ended - started
        self._last_used[name] = ended
        self._deliver(events)

    def _idle(self, now: float) -> None:
        """Nobody has work: run timers that are due, unload what was idle for long, else sleep until something is posted."""
        timers = [(timer, name) for name, engine in self._engines.items() if (timer := engine.next_timer()) is not None]
        for timer, name in timers:
            if timer <= now:
                self._step(name, None)
                return
        ttl = self.config.idle_unload_s
        if ttl:
            for name in [n for n, used in self._last_used.items() if now - used >= ttl]:
                if not self._engines[name].num_requests():
                    self._unload(name)
            timers += [(used + ttl, name) for name, used in self._last_used.items()]
        wait = min((timer - now for timer, _ in timers), default=None)
        self._wake.wait(None if wait is None else max(0.0, wait))
        self._wake.clear()

    def _deliver(self, events: list[AnyEvent]) -> None:
        by_peer: dict[int, tuple[Peer, list[AnyEvent]]] = {}
        for event in events:
            entry = self._requests.get(event.request_id)
            if entry is None:
                continue
            by_peer.setdefault(id(entry[0]), (entry[0], []))[1].append(event)
            if isinstance(event, TERMINAL):
                del self._requests[event.request_id]
        for peer, its_events in by_peer.values():
            peer.deliver(its_events)

    # --------------------------------------------------------------------------------------------- messages

    def _handle(self, message: ToHost, peer: Peer) -> None:
        match message:
            case Submit():
                self._submit(message, peer)
            case Append():
                self._append(message)
            case Update():
                entry = self._requests.get(message.request_id)
                engine = self._engines.get(entry[1]) if entry else None
                if engine is not None:
                    engine.update(message.request_id, priority=message.priority, deadline=message.deadline)
            case Abort():
                self._abort(message.request_id, message.reason)
            case Call():
                self._call(message, peer)

    def _submit(self, message: Submit, peer: Peer) -> None:
        request = message.request
        entry = self._requests.get(request.request_id)
        if entry is not None:
            # The id is taken: only the newcomer hears of it, and it has no stream of its own to end.
            error = InvalidRequest("request_id: this id is already running", param="request_id").info()
            if entry[0] is not peer:
                peer.deliver([Failed(request_id=request.request_id, error=error)])
            return
        self._requests[request.request_id] = (peer, request.model)
        engine = self._engines.get(request.model)
        if engine is None:
            self._wait_for(request.model, peer, message)
            return
        self._last_used[request.model] = self._clock()
        try:
            engine.submit(request)
        except Exception as error:
            self._deliver([Failed(request_id=request.request_id, error=to_info(error))])

    def _append(self, message: Append) -> None:
        entry = self._requests.get(message.request_id)
        if entry is None:
            return  # it has just ended
        engine = self._engines.get(entry[1])
        try:
            if engine is None:
                raise InvalidRequest("append: the model is still loading")
            engine.append(
                message.request_id,
                message.token_ids,
                embeddings=message.embeddings,
                pcm=message.pcm,
                last=message.last,
            )
        except Exception as error:
            if engine is not None:
                engine.abort(message.request_id, "bad_input")
            self._deliver([Failed(request_id=message.request_id, error=to_info(error))])

    def _abort(self, request_id: str, reason: str) -> None:
        entry = self._requests.get(request_id)
        if entry is None:
            return
        engine = self._engines.get(entry[1])
        if engine is not None:
            self._deliver(engine.abort(request_id, reason))
            return
        waiting = self._loading.get(entry[1], [])
        waiting[:] = [w for w in waiting if not (isinstance(w[1], Submit) and w[1].request.request_id == request_id)]
        self._deliver([Aborted(request_id=request_id, reason=reason)])

    def _call(self, message: Call, peer: Peer) -> None:
        try:
            match message.verb:
                case "load":
                    model = str(message.arguments["model"])
                    if model not in self._engines:
                        self._wait_for(model, peer, message)
                        return
                    peer.send(Reply(message.call_id, self._engines[model].info))
                case "unload":
                    self._unload(str(message.arguments["model"]))
                    peer.send(Reply(message.call_id))
                case "stats":
                    models = {
                        name: engine.stats() | {"device_seconds": self._device_s.get(name, 0.0)}
                        for name, engine in self._engines.items()
                    }
                    peer.send(Reply(message.call_id, {"models": models}))
                case "health":
                    states = dict.fromkeys(self._engines, "loaded") | dict.fromkeys(self._loading, "loading")
                    peer.send(Reply(message.call_id, {"models": states}))
                case "stop":
                    self._stop()
                    peer.send(Reply(message.call_id))
                case _:
                    raise InvalidRequest(f"expected a known verb, got {message.verb!r}")
        except Exception as error:
            peer.send(Reply(message.call_id, None, to_info(error)))

    def _disconnect(self, peer: Peer) -> None:
        for request_id in [r for r, (owner, _) in self._requests.items() if owner is peer]:
            self._abort(request_id, "disconnect")

    def _stop(self) -> None:
        for request_id in list(self._requests):
            self._abort(request_id, "shutdown")
        self._stopping = True
        self._wake.set()

    def _fail_all(self, error: BaseException) -> None:
        info = InternalError(f"the engine's loop ended ({type(error).__name__})", code="engine_dead").info()
        self._deliver([Failed(request_id=request_id, error=info) for request_id in list(self._requests)])

    # ------------------------------------------------------------------------------------------------ models

    def _wait_for(self, model: str, peer: Peer, message: Submit | Call) -> None:
        """Keep a message until its model is there; starts the load if nobody has."""
        if model not in self._loading:
            self._load(model)
        if model in self._loading:
            self._loading[model].append((peer, message))
        else:  # refused at once
            self._refuse([(peer, message)], ModelNotFound(f"model {model!r} is not served here", param="model"))

    def _load(self, model: str) -> None:
        if model in self._engines or model in self._loading:
            return
        name = self.config.name_of(model)
        if name is None:
            return
        self._loading[model] = []
        threading.Thread(target=self._load_in_thread, args=(model, name), name="motet-load", daemon=True).start()

    def _load_in_thread(self, model: str, name: str) -> None:
        started = self._clock()

        def report(phase: str) -> None:
            seconds = self._clock() - started
            self._post(lambda: self._report(Progress(model, phase, seconds)))

        try:
            engine = self._build(name, self.config, report)
        except Exception as error:
            failure: Exception = error
            self._post(lambda: self._loaded(model, None, failure))
        else:
            self._post(lambda: self._loaded(model, engine, None))

    def _report(self, progress: Progress) -> None:
        for peer in {id(peer): peer for peer, _ in self._loading.get(progress.model, [])}.values():
            peer.send(progress)

    def _loaded(self, model: str, engine: Engine | None, error: Exception | None) -> None:
        waiting = self._loading.pop(model)
        if engine is None:
            assert error is not None
            self._refuse(waiting, error)
            return
        if self._stopping:
            engine.close()
            return
        self._engines[model] = engine
        self._last_used[model] = self._clock()
        for peer, message in waiting:
            if isinstance(message, Submit):
                del self._requests[message.request.request_id]
            self._handle(message, peer)

    def _refuse(self, waiting: list[tuple[Peer, Submit | Call]], error: Exception) -> None:
        info = error.info() if isinstance(error, MotetError) else to_info(error)
        for peer, message in waiting:
            if isinstance(message, Call):
                peer.send(Reply(message.call_id, None, info))
            else:
                self._deliver([Failed(request_id=message.request.request_id, error=info)])

    def _unload(self, model: str) -> None:
        engine = self._engines.get(model)
        if engine is None:
            return
        for request_id in [r for r, (_, name) in self._requests.items() if name == model]:
            self._abort(request_id, "unloaded")
        del self._engines[model]
        self._last_used.pop(model, None)
        self._arbiter.forget(model)
        engine.close()

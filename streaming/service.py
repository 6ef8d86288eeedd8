"""What all routes share: the engine's client, the frontend, the limits, the counters, and the state of the server.

States: starting -> ready -> draining -> closed. While it is not ready, routes that need the engine answer 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..engine.client import EngineClient
from ..engine.errors import InvalidRequest, ModelNotFound, MotetError, Overloaded, Unavailable
from ..engine.frontend.pictures import PictureCard, PictureFrontend
from ..engine.frontend.speech import SpeechFrontend
from ..engine.frontend.text import TextFrontend
from ..engine.metrics import Metrics
from ..pipelines.decoder_process import DecoderProcess
from .admission import Admission
from .config import DEFAULT_MODEL, ServedModel, ServerConfig
from .exchange import Exchange

if TYPE_CHECKING:
    from .session import SocketSession

# kind of model -> what only it can do
_JOBS = {"llm": "write text", "asr": "transcribe speech", "tts": "speak", "image": "make pictures"}
_BUSY_S = 60.0  # after so long without a word an engine is not busy but down
State = Literal["starting", "ready", "draining", "closed"]


class Service:
    """One server's shared parts. `attach` gives it an engine, `drain` and `abort_all` take it out of service."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.state: State = "starting"
        self.failure: MotetError | None = None  # why the engine could not be started
        self.metrics = Metrics()
        self.admission = Admission(
            max_requests=config.max_queued_requests,
            max_tokens=config.max_queued_tokens,
            on_change=self.metrics.set_queue,
        )
        self.exchanges: set[Exchange] = set()  # requests being worked on
        self.sessions: set[SocketSession] = set()  # open WebSockets
        self.upload_bytes = 0  # held for the requests being worked on
        self.decodes = asyncio.Semaphore(config.max_decodes)
        self.picture_bytes = 0  # of pictures to begin from that wait to be opened
        self.picture_decodes = asyncio.Semaphore(config.max_decodes)  # their own: an audio file may take minutes
        self.decoder = DecoderProcess()
        self.max_model_lens: dict[str, int] = {}  # of models used so far
        self._aborts: set[asyncio.Task[None]] = set()
        self._models = {model.id: model for model in config.models}
        self._client: EngineClient | None = None
        self._last_health: tuple[dict[str, Any] | None, float] = (None, 0.0)  # and when it was given
        self._frontend: TextFrontend | None = None
        self._speech: SpeechFrontend | None = None
        self._pictures: PictureFrontend | None = None

    def attach(self, client: EngineClient) -> None:
        """The engine is there: requests may come."""
        self._client = client
        self._frontend = TextFrontend(client)
        self._speech = SpeechFrontend(client)
        self._pictures = PictureFrontend(client)
        if self.state == "starting":
            self.state = "ready"

    @property
    def client(self) -> EngineClient:
        self._check_open()
        assert self._client is not None
        return self._client

    @property
    def frontend(self) -> TextFrontend:
        self._check_open()
        assert self._frontend is not None
        return self._frontend

    @property
    def speech(self) -> SpeechFrontend:
        self._check_open()
        assert self._speech is not None
        return self._speech

    @property
    def pictures(self) -> PictureFrontend:
        self._check_open()
        assert self._pictures is not None
        return self._pictures

    async def picture_card(self, model: str) -> PictureCard | None:
        """What a loaded model that makes pictures says of itself; None when it does not answer in time."""
        if self._pictures is None:
            return None
        try:
            async with asyncio.timeout(self.config.stats_timeout_s):
                return await self._pictures.card(model)
        except (MotetError, ConnectionError, TimeoutError):
            return None

    def _check_open(self) -> None:
        if self.state in ("draining", "closed"):
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=5.0)
        if self._client is None:
            if self.failure is not None:
                raise self.failure
            raise Unavailable("the engine is starting", code="model_loading", retry_after_s=2.0)

    def model(self, name: str, kind: str | None = "llm") -> ServedModel:
        """The served model of that id; "default" is the first of the kind (None: of any).

        Raises ModelNotFound, and InvalidRequest for a model of another kind.
        """
        if name == DEFAULT_MODEL:
            for model in self._models.values():
                if kind is None or model.kind == kind:
                    return model
        found = self._models.get(name)
        if found is None:
            known = ", ".join(list(self._models)[:8]) or "none"
            raise ModelNotFound(f"the model {name[:80]!r} is not served here; served: {known}", param="model")
        if kind is not None and found.kind != kind:
            job = _JOBS.get(kind, kind)
            raise InvalidRequest(f"the model {name!r} cannot {job}", param="model", code="model_not_suitable")
        return found

    def open_session(self, session: SocketSession) -> None:
        """Count a WebSocket in before it is accepted. Raises Unavailable while closing, Overloaded when full."""
        self._check_open()
        if len(self.sessions) >= self.config.max_sessions:
            raise Overloaded(f"{len(self.sessions)} live sessions are open, the limit", retry_after_s=5.0)
        self.sessions.add(session)

    async def health(self) -> dict[str, Any] | None:
        """`client.health()`; None when the engine is down.

        One that does not answer in time may be busy with a long step: its last words hold for a minute.
        """
        now = asyncio.get_running_loop().time()
        try:
            self._last_health = await self._ask("health"), now
        except TimeoutError:
            if now - self._last_health[1] > _BUSY_S:
                return None
        return self._last_health[0]

    async def stats(self) -> dict[str, Any] | None:
        """`client.stats()`, or None when the engine does not answer in time."""
        try:
            return await self._ask("stats")
        except TimeoutError:
            return None

    async def _ask(self, verb: Literal["health", "stats"]) -> dict[str, Any] | None:
        client = self._client
        if client is None:
            return None
        try:
            async with asyncio.timeout(self.config.stats_timeout_s):
                return await (client.health() if verb == "health" else client.stats())
        except (MotetError, ConnectionError):
            return None

    def abort_in_engine(self, request_ids: Sequence[str], reason: str) -> None:
        """Tell the engine why, before the work on the requests is cancelled. Does not wait."""
        if self._client is not None:
            for request_id in request_ids:
                task = asyncio.ensure_future(self._client.abort(request_id, reason))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    # ---------------------------------------------------------------------------------------------------- the end

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight. True when all ended in time.

        Live sessions hear no more, finish what they have heard and close.
        """
        self.state = "draining"
        for session in self.sessions:
            session.drain()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.exchanges or self.sessions:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def abort_all(self, reason: str = "shutdown") -> None:
        """End every request in flight now; each client is told."""
        self.state = "draining"
        for exchange in list(self.exchanges):
            exchange.stop(reason)
        for session in list(self.sessions):
            session.stop()

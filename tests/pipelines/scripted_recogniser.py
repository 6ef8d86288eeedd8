"""An EngineClient without an engine: it "recognises" one segment per started second of audio, and says what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from motet.engine.errors import ErrorInfo
from motet.engine.types import (
    AnyEvent,
    AudioRequest,
    Done,
    EmbeddingSpan,
    Failed,
    ModelInfo,
    Partial,
    Recognized,
    Segment,
    Speech,
    Timing,
    Word,
)

MODEL = "scripted-recogniser"
RATE = 16_000


class ScriptedRecogniser:
    """`delay_s` passes before each segment. Live audio gives a mark, a partial and a segment per second heard."""

    def __init__(self, *, delay_s: float = 0.0, fail: ErrorInfo | None = None, kind: str = "asr") -> None:
        self.delay_s = delay_s
        self.fail = fail
        self.kind = kind
        self.requests: list[AudioRequest] = []
        self.heard: dict[str, bytearray] = {}  # live audio by request
        self.ended: list[str] = []  # ids whose iterator was closed
        self.num_running = 0
        self.most_running = 0
        self.together = 0  # nobody is answered before so many have run
        self.num_closed = 0
        self.longest_append = 0
        self._news: dict[str, asyncio.Queue[tuple[bytes, bool]]] = {}

    def submit(self, request: AudioRequest) -> AsyncGenerator[AnyEvent, None]:
        return self._events(request)

    async def _events(self, request: AudioRequest) -> AsyncGenerator[AnyEvent, None]:
        name = request.request_id
        self.requests.append(request)
        self.heard[name] = bytearray(request.pcm)
        self._news[name] = asyncio.Queue()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        said = 0
        last = not request.open
        try:
            while self.most_running < self.together:
                await asyncio.sleep(0.001)
            while True:
                num_samples = len(self.heard[name]) // 4
                while said * RATE < num_samples and (last or (said + 1) * RATE <= num_samples):
                    await asyncio.sleep(self.delay_s)
                    if request.open:
                        yield Speech(request_id=name, what="started", sample=said * RATE)
                        yield Partial(request_id=name, committed=f" part{said}", tentative=" maybe", start=float(said))
                    yield Recognized(
                        request_id=name, segments=[segment(said, num_samples, request)], language="en",
                        language_probability=0.75,
                    )  # fmt: skip
                    said += 1
                if last:
                    break
                pcm, last = await self._news[name].get()
                self.heard[name] += pcm
            if self.fail is not None:
                yield Failed(request_id=name, error=self.fail)
                return
            yield Done(
                request_id=name,
                finish_reason="stop",
                timing=Timing(queue_s=0.25, first_token_s=0.3, total_s=0.5),
                audio_s=len(self.heard[name]) / 4 / RATE,
            )
        finally:
            self.num_running -= 1
            self.ended.append(name)

    async def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        self.longest_append = max(self.longest_append, len(pcm))
        self._news[request_id].put_nowait((pcm, last))  # a KeyError: audio came before its request

    async def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None: ...

    async def abort(self, request_id: str, reason: str = "client") -> None: ...

    async def load(self, model: str) -> ModelInfo:
        return ModelInfo(model=model, kind=self.kind, source="", max_model_len=448, vocab_size=51864, hidden_size=384)

    async def unload(self, model: str) -> None: ...

    async def stats(self) -> dict[str, Any]:
        return {}

    async def health(self) -> dict[str, Any]:
        return {"alive": True, "ready": True, "models": {}, "restarts": 0}

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None:
        self.num_closed += 1

    def samples(self, number: int = 0) -> np.ndarray:
        """What request `number` heard, as float32 [T]."""
        return np.frombuffer(bytes(self.heard[self.requests[number].request_id]), dtype="<f4")


def segment(number: int, num_samples: int, request: AudioRequest) -> Segment:
    end = min((number + 1.0), num_samples / RATE)
    words = [Word(word=f" second {number}.", start=float(number), end=end, probability=0.9)]
    return Segment(
        id=number, start=float(number), end=end, text=f" second {number}.", tokens=[number],
        words=words if request.options.word_timestamps else None, language="en",
    )  # fmt: skip

"""An EngineClient without an engine: it "speaks" each utterance as a tone as long as its prompt, in pieces of 0.1 s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np

from motet.engine.errors import ErrorInfo, ModelNotFound
from motet.engine.types import (
    Aborted,
    AnyEvent,
    Audio,
    Done,
    EmbeddingSpan,
    Failed,
    ModelInfo,
    SpeechRequest,
    Timing,
    Usage,
)

MODEL = "scripted-voice"
RATE = 24_000
SECONDS_PER_ID = 0.07
LETTERS = "abcdefghijklmnopqrstuvwxyz ',.?"


def write_voice(folder: Path) -> Path:
    """A voice folder with nothing but its description, which is all that a frontend reads."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "family": "motet-voice",
        "name": MODEL,
        "voices": ["ada"],
        "text": {"letters": LETTERS, "first": 6, "start": 1, "end": 2},
        "phones": {"names": ["pau", "aa"], "first": 37, "start": 3},
        "audio": {"start": 4, "end": 5, "first": 96, "size": 4096, "strides": [4, 2, 1]},
        "max_chars": 90,
    }
    (folder / "speech.json").write_text(json.dumps(about))
    return folder


def said(prompt: list[int]) -> str:
    """The letters behind a prompt."""
    return "".join(LETTERS[token - 6] for token in prompt if token >= 6)


class ScriptedVoice:
    """`delay_s` passes before each piece; requests, their utterances and the ids of those that ended are kept."""

    def __init__(self, folder: Path, *, delay_s: float = 0.0, fail: ErrorInfo | None = None, kind: str = "tts") -> None:
        self.source = str(write_voice(folder))
        self.delay_s = delay_s
        self.fail = fail
        self.kind = kind
        self.requests: list[SpeechRequest] = []
        self.utterances: dict[str, list[list[int]]] = {}
        self.num_made = 0  # utterances that were spoken to their end
        self.ended: list[str] = []  # ids whose iterator was closed
        self.aborted: list[str] = []
        self.num_running = 0
        self.most_running = 0
        self.together = 0  # nobody is answered before so many have run
        self.num_closed = 0
        self._news: dict[str, asyncio.Queue[bool | None]] = {}

    def texts(self, number: int = 0) -> list[str]:
        """What was given to request `number` to say."""
        return [said(prompt) for prompt in self.utterances[self.requests[number].request_id]]

    def submit(self, request: SpeechRequest) -> AsyncGenerator[AnyEvent, None]:
        return self._events(request)

    async def _events(self, request: SpeechRequest) -> AsyncGenerator[AnyEvent, None]:
        name = request.request_id
        self.requests.append(request)
        waiting = self.utterances[name] = list(request.utterances)
        news = self._news[name] = asyncio.Queue()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        number = num_samples = 0
        last = not request.open
        try:
            while self.most_running < self.together:
                await asyncio.sleep(0.001)
            while True:
                while number == len(waiting) and not last:
                    found = await news.get()
                    if found is None:
                        yield Aborted(request_id=name, reason="client")
                        return
                    last = found
                if number == len(waiting):
                    break
                left = tone(len(waiting[number]))
                while left:
                    await asyncio.sleep(self.delay_s)
                    if name in self.aborted:
                        yield Aborted(request_id=name, reason="client")
                        return
                    piece, left = left[:4800], left[4800:]
                    num_samples += len(piece) // 2
                    yield Audio(request_id=name, pcm=piece, utterance=number, last=not left)
                number += 1
                self.num_made += 1
            if self.fail is not None:
                yield Failed(request_id=name, error=self.fail)
                return
            yield Done(
                request_id=name,
                finish_reason="stop",
                usage=Usage(num_prompt_tokens=sum(map(len, waiting)), num_output_tokens=num_samples // 512),
                timing=Timing(queue_s=0.25, first_token_s=0.3, total_s=0.5),
                audio_s=num_samples / RATE,
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
        if token_ids:
            self.utterances[request_id].append(token_ids)  # a KeyError: text came before its request
        self._news[request_id].put_nowait(last)

    async def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None: ...

    async def abort(self, request_id: str, reason: str = "client") -> None:
        self.aborted.append(request_id)
        self._news[request_id].put_nowait(None)

    async def load(self, model: str) -> ModelInfo:
        if model != MODEL:
            raise ModelNotFound(f"no model {model!r}")
        return ModelInfo(
            model=model, kind=self.kind, source=self.source, max_model_len=2048, vocab_size=28768, hidden_size=64
        )

    async def unload(self, model: str) -> None: ...

    async def stats(self) -> dict[str, Any]:
        return {}

    async def health(self) -> dict[str, Any]:
        return {"alive": True, "ready": True, "models": {}, "restarts": 0}

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None:
        self.num_closed += 1


def tone(num_ids: int) -> bytes:
    """int16 PCM at 24 kHz of a prompt of so many ids."""
    times = np.arange(round(num_ids * SECONDS_PER_ID * RATE)) / RATE
    return (8000 * np.sin(2 * np.pi * 220 * times)).astype("<i2").tobytes()

"""An EngineClient without an engine: it answers every request with the tokens of a given text, one event each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

from motet.engine.errors import ErrorInfo, ModelNotFound
from motet.engine.types import AnyEvent, Done, EmbeddingSpan, Failed, ModelInfo, Request, Timing, Tokens, Usage
from motet.models import registry
from motet.models.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m-instruct"


@cache
def packaged_tokenizer() -> tuple[str, Tokenizer]:
    """Path and tokenizer of the packaged model; no weights are read."""
    source = str(registry.resolve(MODEL).path)
    return source, load_tokenizer(source)


class ScriptedClient:
    """`delay_s` passes before each token; requests and the ids of those that ended are kept to be looked at."""

    def __init__(self, text: str = "Hello, wörld! 🎵", *, delay_s: float = 0.0, fail: ErrorInfo | None = None) -> None:
        self.source, self.tokenizer = packaged_tokenizer()
        self.text = text
        self.delay_s = delay_s
        self.fail = fail
        self.requests: list[Request] = []
        self.ended: list[str] = []  # ids whose iterator was closed
        self.num_running = 0
        self.most_running = 0
        self.together = 0  # no stream has its first token before so many have run
        self.num_closed = 0

    def submit(self, request: Request) -> AsyncGenerator[AnyEvent, None]:
        return self._events(request)

    async def _events(self, request: Request) -> AsyncGenerator[AnyEvent, None]:
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        ids = self.tokenizer.encode(self.text)[: request.params.max_tokens]
        try:
            while self.most_running < self.together:
                await asyncio.sleep(0.001)
            for token_id in ids:
                await asyncio.sleep(self.delay_s)
                yield Tokens(request_id=request.request_id, token_ids=[token_id])
            if self.fail is not None:
                yield Failed(request_id=request.request_id, error=self.fail)
                return
            yield Done(
                request_id=request.request_id,
                finish_reason="stop",
                usage=Usage(num_prompt_tokens=len(request.prompt), num_output_tokens=len(ids)),
                timing=Timing(queue_s=0.0, first_token_s=0.5, total_s=1.5),
            )
        finally:
            self.num_running -= 1
            self.ended.append(request.request_id)

    async def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        last: bool = False,
    ) -> None: ...

    async def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None: ...

    async def abort(self, request_id: str, reason: str = "client") -> None: ...

    async def load(self, model: str) -> ModelInfo:
        if model != MODEL:
            raise ModelNotFound(f"no model {model!r}")
        return ModelInfo(
            model=model,
            kind="llm",
            source=self.source,
            max_model_len=512,
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=8,
        )

    async def unload(self, model: str) -> None: ...

    async def stats(self) -> dict[str, Any]:
        return {}

    async def health(self) -> dict[str, Any]:
        return {"alive": True, "ready": True, "models": {}, "restarts": 0}

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None:
        self.num_closed += 1

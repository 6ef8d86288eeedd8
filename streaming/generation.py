"""From a request's words to the frontend and back: sampling parameters, admission, merged events, usage, metrics.

Shared by chat and plain completions. Does not know how an answer looks on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from ..engine.errors import from_info
from ..engine.frontend.events import TextAborted, TextDelta, TextDone, TextEvent, TextFailed, TextRequest
from ..engine.frontend.text import Prepared
from ..engine.types import SamplingParams, StepMask
from .config import ServedModel
from .exchange import DONE, KEEP_ALIVE, Exchange, stopped_error
from .protocol import GenerationRequest, PromptTokensDetails, UsageBody

T = TypeVar("T")
# (number of the prompt, event): what became ready together, to be written together.
Batch: TypeAlias = list[tuple[int, TextEvent]]
_SEED_RANGE = 2**62
_MAX_READY = 256  # events of several prompts that wait for the reader; more wait in the engine's client


def sampling_params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The engine's parameters; a field the client left out takes the value the API documents."""
    top_k = request.top_k if request.top_k is not None and request.top_k > 0 else 0
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=top_k,
        top_p=1.0 if request.top_p is None else max(request.top_p, 1e-6),  # 0 means: the best token alone
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        penalty_window=request.penalty_window or 0,
        logit_bias=request.logit_bias or {},
        allowed=None if request.allowed_token_ids is None else _allow_only(request.allowed_token_ids),
        seed=None if request.seed is None else request.seed % _SEED_RANGE,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _allow_only(ids: Sequence[int]) -> StepMask:
    """The same allowed ids at every step, as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for token in sorted(set(ids)):
        if ranges and ranges[-1][1] == token:
            ranges[-1] = (ranges[-1][0], token + 1)
        else:
            ranges.append((token, token + 1))
    return StepMask(steps=(tuple(ranges),), cycle=True)


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


class Generation:
    """The answers to one HTTP request: `num_prompts` prompts with `n` answers each, through one admission ticket."""

    def __init__(self, exchange: Exchange, model: ServedModel, requests: Sequence[TextRequest]) -> None:
        self.exchange = exchange
        self.model = model
        self.requests = requests
        self.prepared: list[Prepared] = []
        self.num_open = len(requests) * requests[0].n  # answers not ended yet
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.queue_s = 0.0

    async def prepare(self) -> None:
        """Template, tokenize and check every prompt. Raises before anything was submitted."""
        frontend = self.exchange.service.frontend
        for request in self.requests:
            prepared = await frontend.prepare(request)
            self.prepared.append(prepared)
            self.exchange.engine_ids += [child.request_id for child in prepared.children]
            self.exchange.service.max_model_lens[self.model.id] = prepared.info.max_model_len

    async def stream(
        self, render: Callable[[int, TextEvent], bytes], *, opening: bytes, closing: Callable[[], bytes]
    ) -> None:
        """Write the answers as an event stream: `opening` once, what `render` makes of each event, `closing`, [DONE].

        What is ready together is one write; the last answer's end goes out with the end of the stream.
        """
        exchange = self.exchange

        async def break_silence() -> None:
            if exchange.streaming:
                await exchange.write(KEEP_ALIVE)
            else:
                await exchange.start_stream()
                await exchange.write(opening or KEEP_ALIVE)

        tail = b""
        async with contextlib.aclosing(self.batches(break_silence)) as batches:
            async for batch in batches:
                body = b"".join([render(prompt, event) for prompt, event in batch])
                if not body:
                    continue
                if not exchange.streaming:
                    await exchange.start_stream()
                    body = opening + body
                if self.num_open:
                    await exchange.write(body)
                else:
                    tail += body
        await exchange.end_stream(tail + closing() + DONE)

    async def batches(self, on_silence: Callable[[], Awaitable[None]] | None = None) -> AsyncGenerator[Batch, None]:
        """Events as they become ready. Raises MotetError when one answer failed; leaving early aborts all of them.

        `on_silence` is called after each `sse_keep_alive_s` without an answer, until the first text.
        """
        exchange, metrics = self.exchange, self.exchange.service.metrics
        n = self.requests[0].n
        ticket = exchange.service.admission.admit(
            n * len(self.prepared), n * sum(len(prepared.prompt_ids) for prepared in self.prepared)
        )
        meters = metrics.meters(self.model.id)
        for request in self.requests:
            metrics.observe_submitted(self.model.id, n=n, max_tokens=request.params.max_tokens)
        last: dict[tuple[int, int], float] = {}
        # One prompt needs no queue and no tasks.
        single = len(self.prepared) == 1
        events = self.exchange.service.frontend.stream(self.prepared[0]) if single else self._merged()
        try:
            while True:
                waiting = on_silence is not None and not last
                ready = await (self._first(events, on_silence) if waiting else anext(events, None))
                if ready is None:
                    return
                batch: Batch = ready if isinstance(ready, list) else [(0, ready)]
                for prompt, event in batch:
                    if type(event) is TextDelta:
                        now = time.perf_counter()
                        before = last.get((prompt, event.index))
                        if before is None:
                            ticket.leave()
                            meters.first_token.observe(now - exchange.started)
                        else:
                            meters.inter_token.observe(now - before)
                        last[prompt, event.index] = now
                    elif type(event) is TextDone:
                        self._count(event)
                    elif type(event) is TextFailed:
                        metrics.observe_failed(self.model.id, event.error.code)
                        raise from_info(event.error)
                    elif type(event) is TextAborted:
                        metrics.observe_aborted(self.model.id, event.reason)
                        raise stopped_error(event.reason)
                yield batch
        except asyncio.CancelledError:
            metrics.observe_aborted(self.model.id, exchange.stop_reason or "shutdown")
            raise
        finally:
            ticket.leave()
            await events.aclose()

    async def _first(
        self, events: AsyncGenerator[T, None], on_silence: Callable[[], Awaitable[None]] | None
    ) -> T | None:
        """The next of them, while silence is broken now and then. The wait itself is never cancelled by the clock."""
        pending = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({pending}, timeout=self.exchange.service.config.sse_keep_alive_s))[0]:
                if on_silence is not None:
                    await on_silence()
            return pending.result()
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})

    def _count(self, done: TextDone) -> None:
        usage = done.usage
        self.num_open -= 1
        if done.index == 0:
            self.num_prompt_tokens += usage.num_prompt_tokens
            self.num_cached_tokens += usage.num_cached_tokens
        self.num_output_tokens += usage.num_output_tokens
        self.queue_s = max(self.queue_s, done.timing.queue_s)
        latency_s = time.perf_counter() - self.exchange.started
        self.exchange.service.metrics.observe_done(self.model.id, done.finish_reason, usage, done.timing, latency_s)

    async def _merged(self) -> AsyncGenerator[Batch, None]:
        """The events of several prompts as they come."""
        frontend = self.exchange.service.frontend
        queue: asyncio.Queue[tuple[int, TextEvent | Exception | None]] = asyncio.Queue(maxsize=_MAX_READY)

        async def pump(prompt: int, prepared: Prepared) -> None:
            try:
                async with contextlib.aclosing(frontend.stream(prepared)) as events:
                    async for event in events:
                        await queue.put((prompt, event))
            except Exception as error:
                await queue.put((prompt, error))
            else:
                await queue.put((prompt, None))

        tasks = [asyncio.create_task(pump(prompt, prepared)) for prompt, prepared in enumerate(self.prepared)]
        num_open = len(tasks)
        try:
            while num_open:
                ready = [await queue.get()]
                while not queue.empty():
                    ready.append(queue.get_nowait())
                batch: Batch = []
                for prompt, entry in ready:
                    if entry is None:
                        num_open -= 1
                    elif isinstance(entry, Exception):
                        raise entry
                    else:
                        batch.append((prompt, entry))
                if batch:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def usage(self) -> UsageBody:
        return UsageBody(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached_tokens),
        )

"""Ours, as the benchmarks drive it: the engine in a child process, exactly as the server has it, without HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from motet.benchmarks.peer_worker import process_cpu_s
from motet.engine.config import EngineConfig, HostConfig
from motet.engine.process_client import ProcessClient
from motet.engine.types import Done, ModelInfo, Request, SamplingParams, Tokens


class EngineError(Exception):
    """A request of ours did not end as asked."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as its reader saw it. Seconds since submit."""

    num_tokens: int
    num_cached_tokens: int
    first_token_s: float
    seconds: float  # to its end


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Seconds between one stream's tokens and its next, of all streams; while they were alone, and beside a prefill."""

    alone_s: list[float]
    beside_s: list[float]
    prefill_s: float


class MotetEngine:
    """A loaded model behind a ProcessClient, called from plain code. Use as a context manager.

    The event loop runs only during a call: between calls this process does nothing.
    """

    def __init__(self, model: str, engine: EngineConfig, *, threads: int) -> None:
        self.model = model
        # The loop that the server uses too: the baseline is the engine at its best.
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._numbers = itertools.count()
        try:
            self._client = self._runner.run(
                ProcessClient.start(HostConfig(models=(model,), threads=threads, engine=engine))
            )
        except BaseException:
            self._runner.close()
            raise
        try:
            self.info: ModelInfo = self._runner.run(self._client.load(model))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MotetEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Dtype and how the weights lie in memory."""
        return f"motet {self.info.dtype}, weights {self.info.weight_format}"

    def cpu_s(self) -> float:
        """CPU seconds of the engine's process so far."""
        pid = self._client.pid
        return 0.0 if pid is None else process_cpu_s(pid)

    def streams(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Tokens per second of all prompts at the same time: all new tokens over the wall time, prefills included."""
        began = time.perf_counter()
        answers = self._runner.run(self._all(prompts, max_tokens))
        seconds = time.perf_counter() - began
        if any(answer.num_tokens != max_tokens for answer in answers):
            raise EngineError(f"expected {max_tokens} tokens each, got {[answer.num_tokens for answer in answers]}")
        return len(prompts) * max_tokens / seconds

    def one(self, prompt: list[int], *, max_tokens: int = 1, salt: str = "") -> Answer:
        """One prompt alone. Prefixes are shared only between requests of the same salt."""
        return self._runner.run(self._one(prompt, max_tokens, salt))

    def pauses(self, prompts: Sequence[list[int]], long: list[int], *, idle_s: float, salt: str) -> Pauses:
        """Run `prompts` as endless streams for `idle_s`, then beside them the prompt `long` to its first token.

        Raises EngineError when a stream meets its end meanwhile.
        """
        return self._runner.run(self._pauses(prompts, long, idle_s, salt))

    def close(self) -> None:
        try:
            self._runner.run(self._client.close())
        finally:
            self._runner.close()

    async def _all(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
        return await asyncio.gather(*(self._one(prompt, max_tokens, "") for prompt in prompts))

    async def _pauses(self, prompts: Sequence[list[int]], long: list[int], idle_s: float, salt: str) -> Pauses:
        arrivals: list[list[float]] = [[] for _ in prompts]
        room = self.info.max_model_len - max(map(len, prompts)) - 1
        tasks = [asyncio.ensure_future(self._note(p, room, salt, seen)) for p, seen in zip(prompts, arrivals)]
        try:
            while any(len(seen) < 4 for seen in arrivals):
                await self._unless_over(tasks, 0.002)
            began = time.perf_counter()
            await self._unless_over(tasks, idle_s)
            came = time.perf_counter()
            await self._one(long, 1, salt)
            went = time.perf_counter()
            await self._unless_over(tasks, 0.0)
        finally:
            for task in tasks:
                task.cancel()  # leaving an iterator aborts its request
            await asyncio.gather(*tasks, return_exceptions=True)
        alone = [pause for seen in arrivals for end, pause in _pauses_of(seen) if began < end <= came]
        beside = [pause for seen in arrivals for end, pause in _pauses_of(seen) if came < end <= went]
        if not alone or not beside:
            raise EngineError(f"{len(alone)} pauses were seen without and {len(beside)} beside the long prompt")
        return Pauses(alone_s=alone, beside_s=beside, prefill_s=went - came)

    async def _note(self, prompt: list[int], max_tokens: int, salt: str, arrivals: list[float]) -> None:
        """Run one stream and write down when its tokens come."""
        async for event in self._client.submit(self._request(prompt, max_tokens, salt)):
            if not isinstance(event, Tokens):
                raise EngineError(f"a stream ended before it was to: {event}")
            arrivals.append(time.perf_counter())

    @staticmethod
    async def _unless_over(tasks: Sequence[asyncio.Future[None]], seconds: float) -> None:
        """Sleep; a stream that has ended meanwhile is an error."""
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
            raise EngineError("a stream ended before it was to")

    def _request(self, prompt: list[int], max_tokens: int, salt: str) -> Request:
        return Request(
            request_id=f"bench-{next(self._numbers)}",
            model=self.model,
            prompt=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            cache_salt=salt,
        )

    async def _one(self, prompt: list[int], max_tokens: int, salt: str) -> Answer:
        request = self._request(prompt, max_tokens, salt)
        began = time.perf_counter()
        first_token_s = 0.0
        num_tokens = 0
        async for event in self._client.submit(request):
            if isinstance(event, Tokens):
                num_tokens += len(event.token_ids)
                first_token_s = first_token_s or time.perf_counter() - began
            elif isinstance(event, Done):
                return Answer(
                    num_tokens=num_tokens,
                    num_cached_tokens=event.usage.num_cached_tokens,
                    first_token_s=first_token_s,
                    seconds=time.perf_counter() - began,
                )
            else:
                raise EngineError(str(event))
        raise EngineError("the stream ended without its end")


def _pauses_of(arrivals: Sequence[float]) -> list[tuple[float, float]]:
    """(its end, the pause) between consecutive arrivals."""
    return [(later, later - earlier) for earlier, later in itertools.pairwise(arrivals)]

"""Our picture engine as the benchmarks drive it: in a child process, exactly as the server has it, without HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import uvloop
from numpy.typing import NDArray

from motet.benchmarks.motet_engine import EngineError
from motet.engine.client import EngineClient
from motet.engine.config import EngineConfig, HostConfig, PictureConfig
from motet.engine.process_client import ProcessClient
from motet.engine.types import Denoising, Done, ImageRequest, ModelInfo, Picture

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class Painted:
    """One picture as its reader saw it: uint8 [H, W, 3], and seconds since it was asked for."""

    pixels: Pixels
    seconds: float


class MotetPainter:
    """A loaded picture model behind a ProcessClient, called from plain code. Use as a context manager.

    The event loop runs only during a call: between calls this process does nothing.
    """

    def __init__(self, model: str, engine: EngineConfig, pictures: PictureConfig, *, threads: int, steps: int) -> None:
        self.model = model
        self.steps = steps
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._numbers = itertools.count()
        config = HostConfig(models=(model,), threads=threads, engine=engine, pictures=pictures)
        try:
            self._client = self._runner.run(ProcessClient.start(config))
        except BaseException:
            self._runner.close()
            raise
        try:
            self.info: ModelInfo = self._runner.run(self._client.load(model))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MotetPainter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return f"motet {self.info.dtype}"

    def paint(self, prompt: str, *, seed: int = 0) -> Painted:
        """One picture alone."""
        return self._runner.run(self._one(prompt, seed))

    def together(self, prompts: Sequence[str]) -> tuple[list[Painted], float]:
        """All at the same time, seeds 0, 1...; and the seconds until the last one is there."""
        began = time.perf_counter()
        painted = self._runner.run(self._all(prompts))
        return painted, time.perf_counter() - began

    def late(self, prompts: Sequence[str], late_prompt: str, *, after_s: float, waits: bool) -> float:
        """Seconds that one picture takes which is asked for `after_s` after a batch began. `waits`: until that batch is over,
        as it has to where a batch is fixed once it runs."""
        return self._runner.run(self._late(prompts, late_prompt, after_s, waits))

    def close(self) -> None:
        try:
            self._runner.run(self._client.close())
        finally:
            self._runner.close()

    async def _all(self, prompts: Sequence[str]) -> list[Painted]:
        return await asyncio.gather(*(self._one(prompt, seed) for seed, prompt in enumerate(prompts)))

    async def _late(self, prompts: Sequence[str], late_prompt: str, after_s: float, waits: bool) -> float:
        batch = asyncio.create_task(self._all(prompts))
        await asyncio.sleep(after_s)
        arrived = time.perf_counter()
        if waits:
            await batch
        await self._one(late_prompt, len(prompts))
        seconds = time.perf_counter() - arrived
        await batch
        return seconds

    async def _one(self, prompt: str, seed: int) -> Painted:
        request = ImageRequest(
            request_id=f"bench-{next(self._numbers)}", model=self.model, prompt=prompt, seed=seed, num_steps=self.steps
        )
        return await painted(self._client, request)


async def painted(client: EngineClient, request: ImageRequest) -> Painted:
    """The picture of a request for one. Raises EngineError when it ends without."""
    began = time.perf_counter()
    pixels: Pixels | None = None
    async for event in client.submit(request):
        if isinstance(event, Picture):
            pixels = np.frombuffer(event.image.data, np.uint8).reshape(event.image.shape)
        elif isinstance(event, Done):
            break
        elif not isinstance(event, Denoising):
            raise EngineError(str(event)[:300])
    if pixels is None:
        raise EngineError("the request ended without its picture")
    return Painted(pixels=pixels, seconds=time.perf_counter() - began)

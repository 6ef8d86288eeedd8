"""What all pipelines are: one model on a hub, their own or a shared one, and several inputs of one call that run together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Self, TypeVar

from ..engine.config import EngineConfig, HostConfig, PictureConfig
from ..engine.types import ModelInfo
from .hub import Hub, default_model

In = TypeVar("In")
Out = TypeVar("Out")


class Pipeline:
    """A model on a hub. Close it, or use it in a `with` block. Calls may come from several threads and loops at once."""

    model: str
    hub: Hub
    info: ModelInfo

    def __init__(
        self,
        kind: str,
        model: str | None,
        *,
        engine: EngineConfig | None,
        threads: int,
        hub: Hub | None,
        pictures: PictureConfig | None = None,
    ) -> None:
        """Load `model` (None: the first installed one of `kind`). `hub`, where given, is shared and stays the caller's to close;
        the other settings are its then."""
        self.model = model or default_model(kind)
        self._owns_hub = hub is None
        self.hub = hub or Hub(
            HostConfig(
                models=(self.model,),
                threads=threads,
                engine=engine or EngineConfig(),
                pictures=pictures or PictureConfig(),
            )
        )
        try:
            self.info = self.hub.load(self.model)
            self._loaded()
        except BaseException:
            self.close()
            raise

    def _loaded(self) -> None:
        """What a kind of pipeline asks of its model once that is loaded; what it raises is the constructor's."""

    def close(self) -> None:
        if self._owns_hub:
            self.hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


async def together(work: Callable[[In], Awaitable[Out]], inputs: Iterable[In], *, most: int = 0) -> list[Out]:
    """The results of all inputs in order, at most `most` at a time (0: no limit). The first error is the call's, and cancels the
    rest."""
    room = asyncio.Semaphore(most) if most else None

    async def one(each: In) -> Out:
        if room is None:
            return await work(each)
        async with room:
            return await work(each)

    tasks = [asyncio.create_task(one(each)) for each in inputs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()

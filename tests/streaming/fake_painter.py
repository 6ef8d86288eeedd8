"""The painting side of the fake engine: each picture is one colour out of its seed, and comes out of white step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from motet.engine.errors import ErrorInfo
from motet.engine.picture_request import PictureOrder, PictureRules, check_order
from motet.engine.types import (
    Aborted,
    AnyEvent,
    Blob,
    Denoising,
    Done,
    Failed,
    ImageRequest,
    Picture,
    Timing,
    Usage,
)

IMAGE = "fake-image"
CARD: dict[str, Any] = {
    "family": "fake",
    "sizes": [[32, 32], [48, 32]],
    "num_steps": 8,
    "max_steps": 100,
    "few_step": False,
    "guidance": "cfg",
    "guidance_scale": 3.0,
    "max_guidance": 20.0,
    "solver": "euler",
    "solvers": ["euler", "lcm"],
    "max_prompt_chars": 2000,
    "takes_image": True,
}
_RULES = PictureRules(
    sizes=((32, 32), (48, 32)), num_steps=8, max_steps=100, guidance_scale=3.0, solver="euler", solvers=("euler", "lcm")
)


def colour(seed: int) -> tuple[int, int, int]:
    return (seed * 37 % 256, seed * 91 % 256, seed * 151 % 256)


class FakePainter:
    """One request's work. Pictures of one request are made side by side."""

    def __init__(self, request: ImageRequest, stopped: Callable[[], str], step: Callable[[], Any]) -> None:
        self.request = request
        self.order: PictureOrder = check_order(request, _RULES)
        self.stopped = stopped
        self.step = step
        self.num_steps = 0  # that were made
        self.num_previews = 0

    async def events(self, fail_after: int | None = None) -> AsyncIterator[AnyEvent]:
        request_id, order = self.request.request_id, self.order
        total = order.num_steps - order.begin
        for done in range(1, total + 1):
            await self.step()
            if reason := self.stopped():
                yield Aborted(request_id=request_id, reason=reason)
                return
            if fail_after is not None and self.num_steps >= fail_after:
                error = ErrorInfo(kind="EngineDead", message="the engine ended", code="engine_dead")
                yield Failed(request_id=request_id, error=error)
                return
            self.num_steps += 1
            for index, seed in enumerate(order.seeds):
                wanted = order.preview_every and done < total and done % order.preview_every == 0
                self.num_previews += bool(wanted)
                preview = self._picture(seed, done / total) if wanted else None
                yield Denoising(request_id=request_id, step=done, num_steps=total, index=index, preview=preview)
        for index, seed in reversed(list(enumerate(order.seeds))):  # the last may well be the first
            yield Picture(request_id=request_id, index=index, seed=seed, image=self._picture(seed, 1.0))
        usage = Usage(num_prompt_tokens=len(order.prompt.split()))
        timing = Timing(queue_s=0.001, first_token_s=0.002, total_s=0.01)
        yield Done(request_id=request_id, finish_reason="stop", usage=usage, timing=timing)

    def _picture(self, seed: int, share: float) -> Blob:
        pixels = np.full((self.order.height, self.order.width, 3), 255, np.float32)
        pixels += share * (np.array(colour(seed), np.float32) - pixels)
        return Blob(dtype="uint8", shape=pixels.shape, data=pixels.round().astype(np.uint8).tobytes())

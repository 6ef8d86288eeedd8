"""The picture frontend: a request in words to finished pictures as pixels. Lives with the client; torch-free.

`prepare` does everything that can refuse a request (by the model's card, before anything is submitted) and draws the seed
where none is given; `stream` submits and yields what comes of it, then exactly one terminal event; `paint` is both. Previews
are spread evenly over the steps that run, and those that nobody asked for are never decoded where that can be helped.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..client import EngineClient
from ..errors import InvalidRequest, MotetError, UnsupportedParameter
from ..picture_request import MAX_PICTURES, PictureOrder, PictureRules, check_order
from ..types import Aborted, Blob, Denoising, Done, Failed, ImageRequest, ModelInfo, Picture

Pixels: TypeAlias = NDArray[np.uint8]  # [height, width, 3]
OpenImage: TypeAlias = Callable[[int, int], Awaitable[Pixels]]  # width, height -> pixels of that size

_DRAWN_SEEDS = 2**32  # a seed that people copy from one program to another
_FIELDS = {"num_steps": "steps", "preview_every": "num_previews"}  # the engine's word -> ours


@dataclass(frozen=True, kw_only=True)
class PaintRequest:
    """One request for pictures. None: the model's own."""

    model: str
    prompt: str
    negative_prompt: str = ""
    size: tuple[int, int] | None = None  # width, height
    n: int = 1
    steps: int | None = None
    guidance_scale: float | None = None
    solver: str | None = None
    seed: int | None = None  # picture i is made from seed + i
    image: OpenImage | None = None  # begin from this one: called with the size once all else is known to be right
    strength: float | None = None  # how much of it is made anew, above 0 to 1
    num_previews: int = 0  # of each picture
    priority: int = 0  # lower runs earlier
    deadline: float | None = None
    request_id: str = ""  # made by the server; empty: the frontend makes one


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureProgress:
    """Picture `index` has `step` of `num_steps` steps behind it; some of these hold what it looks like so far."""

    index: int
    step: int
    num_steps: int
    preview: Pixels | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPicture:
    """A picture, and the seed that makes it again alone."""

    index: int
    seed: int
    pixels: Pixels


PictureEvent: TypeAlias = PictureProgress | FinishedPicture | Done | Aborted | Failed


@dataclass(frozen=True, kw_only=True)
class PictureCard:
    """What a model of this kind says of itself."""

    model: str
    family: str
    rules: PictureRules

    @property
    def num_steps(self) -> int:
        return self.rules.num_steps

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return self.rules.sizes


@dataclass(frozen=True, kw_only=True)
class PreparedPictures:
    """A request that passed every check here."""

    request: ImageRequest
    order: PictureOrder
    num_previews: int

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_steps(self) -> int:
        """Steps that run: fewer than asked for where a picture is the beginning."""
        return self.order.num_steps - self.order.begin


class PictureFrontend:
    """Words in, pixels out, over one `EngineClient`. One object serves any number of requests at once."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def card(self, model: str) -> PictureCard:
        """What the model allows; it is loaded for it. Raises MotetError."""
        return _card(await self._client.load(model))

    async def prepare(self, request: PaintRequest) -> PreparedPictures:
        """Check a request and open its picture. Raises MotetError, `param` naming the field; nothing was submitted then."""
        card = await self.card(request.model)
        engine_request = _image_request(request)
        order = _checked(engine_request, card.rules)
        if request.image is None:
            if request.strength is not None:
                raise UnsupportedParameter("strength: has no effect without an image", param="strength")
        else:
            if not card.rules.takes_image:
                raise UnsupportedParameter("image: this model makes pictures from text alone", param="image")
            strength = engine_request.strength if request.strength is None else request.strength
            if not 0 < strength <= 1:  # also for NaN
                raise InvalidRequest(f"strength: expected above 0 and up to 1, got {strength}", param="strength")
            pixels = await request.image(order.width, order.height)
            engine_request.strength = strength
            engine_request.image = Blob(dtype="uint8", shape=pixels.shape, data=pixels.tobytes())
            order = _checked(engine_request, card.rules)
        if request.num_previews:
            engine_request.preview_every = preview_every(order.num_steps - order.begin, request.num_previews)
        return PreparedPictures(request=engine_request, order=order, num_previews=request.num_previews)

    async def paint(self, request: PaintRequest) -> AsyncGenerator[PictureEvent, None]:
        """`prepare` and `stream` in one; errors of the former are raised at the first step."""
        stream = self.stream(await self.prepare(request))
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def stream(self, prepared: PreparedPictures) -> AsyncGenerator[PictureEvent, None]:
        """Submit; progress, pictures in the order in which they are finished, one terminal event. Closing it aborts."""
        request = prepared.request
        steps = preview_steps(prepared.num_steps, prepared.num_previews)
        wanted = {index: list(steps) for index in range(request.n)}
        events: AsyncIterator[Any] = self._client.submit(request)
        try:
            async for event in events:
                if isinstance(event, Denoising):
                    yield _progress(event, wanted.get(event.index, []))
                elif isinstance(event, Picture):
                    yield FinishedPicture(index=event.index, seed=event.seed, pixels=_pixels(event.image))
                elif isinstance(event, (Done, Aborted, Failed)):
                    yield _ending(event)
                    return
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()


# ----------------------------------------------------------------------------------------------------------- previews


def preview_every(num_steps: int, num_previews: int) -> int:
    """Steps between the engine's previews, so that there are at least `num_previews` of them before the last step."""
    even = int(num_steps / (num_previews + 1) + 0.5)
    return max(1, min(even, (num_steps - 1) // num_previews))


def preview_steps(num_steps: int, num_previews: int) -> list[int]:
    """Which of the engine's previews are taken: as many as asked for (or as there are steps for), spread evenly."""
    if not num_previews:
        return []
    every = preview_every(num_steps, num_previews)
    num_offered = (num_steps - 1) // every
    if num_offered <= num_previews:
        return [every * (at + 1) for at in range(num_offered)]
    return [every * int((at + 1) * (num_offered + 1) / (num_previews + 1) + 0.5) for at in range(num_previews)]


def _progress(event: Denoising, wanted: list[int]) -> PictureProgress:
    """An event for the reader. A preview that came late, or instead of one that was left out, is taken as well."""
    preview = None
    if event.preview is not None and wanted and event.step >= wanted[0]:
        while wanted and wanted[0] <= event.step:
            del wanted[0]
        preview = _pixels(event.preview)
    return PictureProgress(index=event.index, step=event.step, num_steps=event.num_steps, preview=preview)


# ----------------------------------------------------------------------------------------------------------- checking


def _card(info: ModelInfo) -> PictureCard:
    if info.kind != "image":
        raise InvalidRequest(f"model: {info.model} does not make pictures (it is of kind {info.kind!r})", param="model")
    extra: Mapping[str, Any] = info.extra
    num_steps = int(extra["num_steps"])
    rules = PictureRules(
        sizes=tuple((int(width), int(height)) for width, height in extra["sizes"]),
        num_steps=num_steps,
        max_steps=int(extra["max_steps"]),
        guidance=extra["guidance"],
        guidance_scale=float(extra["guidance_scale"]),
        max_guidance=float(extra.get("max_guidance", PictureRules.max_guidance)),
        solver=extra["solver"],
        solvers=tuple(extra["solvers"]),
        sigmas=(0.0,) * num_steps if extra["few_step"] else (),  # only how many there are is of interest here
        max_prompt_chars=int(extra["max_prompt_chars"]),
        takes_image=bool(extra["takes_image"]),
    )
    return PictureCard(model=info.model, family=str(extra.get("family", "")), rules=rules)


def _image_request(request: PaintRequest) -> ImageRequest:
    """The engine's request, as yet without a picture and without previews. What means "the model's own" there and nothing
    here is refused."""
    if request.size is not None and not all(side > 0 for side in request.size):
        raise InvalidRequest(f"size: expected sides above 0, got {request.size[0]}x{request.size[1]}", param="size")
    if request.steps is not None and request.steps < 1:
        raise InvalidRequest(f"steps: expected 1 or more, got {request.steps}", param="steps")
    if request.num_previews < 0:
        raise InvalidRequest(f"num_previews: expected 0 or more, got {request.num_previews}", param="num_previews")
    if not 1 <= request.n <= MAX_PICTURES:  # before as many seeds are counted
        raise InvalidRequest(f"n: expected 1 to {MAX_PICTURES}, got {request.n}", param="n")
    width, height = request.size or (0, 0)
    return ImageRequest(
        request_id=request.request_id or f"image-{secrets.token_hex(12)}",
        model=request.model,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=width,
        height=height,
        num_steps=request.steps or 0,
        guidance_scale=request.guidance_scale,
        seed=secrets.randbelow(_DRAWN_SEEDS) if request.seed is None else request.seed,
        n=request.n,
        solver=request.solver or "",
        priority=request.priority,
        deadline=request.deadline,
    )


def _checked(request: ImageRequest, rules: PictureRules) -> PictureOrder:
    try:
        return check_order(request, rules)
    except InvalidRequest as error:
        raise _in_our_words(error) from None


def _in_our_words(error: MotetError) -> MotetError:
    """The engine's refusal with the field named as callers know it."""
    name = _FIELDS.get(error.param or "")
    if name is None:
        return error
    message = error.message.replace(f"{error.param}:", f"{name}:", 1)
    return type(error)(message, param=name, code=error.code, retry_after_s=error.retry_after_s)


def _ending(event: Done | Aborted | Failed) -> Done | Aborted | Failed:
    if isinstance(event, Failed) and event.error.param in _FIELDS:
        name = _FIELDS[event.error.param]
        message = event.error.message.replace(f"{event.error.param}:", f"{name}:", 1)
        error = type(event.error)(
            kind=event.error.kind,
            message=message,
            code=event.error.code,
            param=name,
            retry_after_s=event.error.retry_after_s,
        )
        return msgspec.structs.replace(event, error=error)
    return event


def _pixels(blob: Blob) -> Pixels:
    """A picture as it comes from the engine; not writable."""
    return np.frombuffer(blob.data, np.uint8).reshape(blob.shape)

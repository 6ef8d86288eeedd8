"""Pictures: text in, PIL images out; whole or with progress, sync or async, one prompt or many.

    from motet import ImageGeneration

    with ImageGeneration("motet-emoji") as pictures:
        pictures("a red apple on a blue background").save("apple.png")
        four = pictures("a cat", n=4, seed=7)                # a list; picture i is that of seed 7 + i
        both = pictures(["a rocket", "two small cars"])      # made together, in order
        for event in (stream := pictures.stream("a big cat", steps=30, num_previews=5)):
            print(event)                                     # ImageProgress with previews, then MadePicture
        print(stream.result.timing)

Keywords are `n` and those of `ImageOptions`. Errors are those of engine/errors.py; `param` names the keyword. Knows no latents,
no solvers and no models. Imports PIL where the first picture is there.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import numbers
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from ..engine.config import EngineConfig, PictureConfig
from ..engine.errors import InvalidRequest, Unavailable, from_info
from ..engine.frontend.pictures import (
    FinishedPicture,
    OpenImage,
    PaintRequest,
    PictureCard,
    PictureEvent,
    PictureProgress,
    Pixels,
)
from ..engine.types import Aborted, Done, Failed
from .collected import AsyncCollectedStream, Collected, CollectedStream
from .hub import Hub
from .pipeline import Pipeline, together
from .types import ImageEvent, ImageOptions, ImageProgress, ImageResult, ImageTiming, MadePicture

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_TOGETHER = 16  # prompts of one call that are with the engine at a time


class ImageGeneration(Pipeline):
    """A model of pictures. Calls may come from several threads and loops at once; their steps are batched together."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineConfig | None = None,
        config: PictureConfig | None = None,
        threads: int = 0,
        hub: Hub | None = None,
    ) -> None:
        """Load `model` (None: the first installed one for pictures); blocks until it can paint.

        `config` chooses attention, weights, caches and devices of the stages. Pass `hub` to share engines with other
        pipelines; it is then yours to close, and `engine`, `config` and `threads` are its.
        """
        super().__init__("image", model, engine=engine, threads=threads, hub=hub, pictures=config)

    def _loaded(self) -> None:
        self.card: PictureCard = self.hub.run(self.hub.pictures.card(self.model))

    @overload
    def __call__(self, prompt: str, **options: Unpack[ImageOptions]) -> Image: ...
    @overload
    def __call__(self, prompt: str, *, n: int, **options: Unpack[ImageOptions]) -> Any: ...
    @overload
    def __call__(self, prompt: list[str], *, n: int = 1, **options: Unpack[ImageOptions]) -> list[Any]: ...
    def __call__(self, prompt: str | list[str], *, n: int = 1, **options: Unpack[ImageOptions]) -> Any:
        """The picture of a prompt, a list of them for `n` above 1, or a list with that of each of a list of prompts."""
        return self.hub.run(self._paint(prompt, n, options))

    @overload
    async def call_async(self, prompt: str, **options: Unpack[ImageOptions]) -> Image: ...
    @overload
    async def call_async(self, prompt: str, *, n: int, **options: Unpack[ImageOptions]) -> Any: ...
    @overload
    async def call_async(self, prompt: list[str], *, n: int = 1, **options: Unpack[ImageOptions]) -> list[Any]: ...
    async def call_async(self, prompt: str | list[str], *, n: int = 1, **options: Unpack[ImageOptions]) -> Any:
        """`pictures(...)` for a caller on an event loop; cancelling it aborts the requests."""
        return await self.hub.run_async(self._paint(prompt, n, options))

    def stream(self, prompt: str, *, n: int = 1, **options: Unpack[ImageOptions]) -> ImageStream:
        """Iterate the progress of a prompt's pictures, and each of them once it is made.

        Raises at once what is wrong with the request. Closing it early frees what was computed for it.
        """
        return ImageStream(_Run(self.hub, self.model, prompt, n, options))

    def stream_async(self, prompt: str, *, n: int = 1, **options: Unpack[ImageOptions]) -> AsyncImageStream:
        """`stream` for `async for`; leaving it early aborts the request."""
        return AsyncImageStream(_Run(self.hub, self.model, prompt, n, options))

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Width and height of the pictures that this model makes; the first is the default."""
        return self.card.sizes

    async def _paint(self, prompt: str | list[str], n: int, options: ImageOptions) -> Any:
        """Runs on the hub's loop."""
        if not isinstance(prompt, (list, tuple)):
            return _images(await _collect(self.hub, _request(self.model, prompt, n, options)))
        if not prompt:
            return []
        # What is wrong with all of them is said before any work, and a picture to begin with is read once.
        request = _request(self.model, prompt[0], n, options)

        async def one(text: str) -> Any:
            return _images(await _collect(self.hub, replace(request, prompt=_text("prompt", text))))

        return await together(one, prompt, most=NUM_TOGETHER)


# ------------------------------------------------------------------------------------------------------------- streams


class _Run(Collected[ImageEvent, ImageResult]):
    """One request on its way. Of progress that nobody took yet the newest of each picture is kept."""

    what = "picture"

    def __init__(self, hub: Hub, model: str, prompt: str, n: int, options: ImageOptions) -> None:
        super().__init__(hub)
        self._model, self._prompt, self._n, self._options = model, prompt, n, options

    async def _run(self, ready: Future[None]) -> ImageResult:
        request = _request(self._model, self._prompt, self._n, self._options)
        prepared = await self.hub.pictures.prepare(request)
        ready.set_result(None)
        made = _Made()
        stream = self.hub.pictures.stream(prepared)
        try:
            async for event in stream:
                if (item := made.add(event)) is not None:
                    self._put(item)
        finally:
            await stream.aclose()
        return made.result()

    def _put(self, item: ImageEvent) -> None:
        if isinstance(item, ImageProgress):
            for at, older in enumerate(self._items):
                if isinstance(older, ImageProgress) and older.index == item.index:
                    item = replace(item, preview=item.preview or older.preview)
                    del self._items[at]
                    break
        super()._put(item)


class ImageStream(CollectedStream[ImageEvent, ImageResult]):
    """Progress and pictures as they come; of several, in any order. After the last one `result` holds them all."""


class AsyncImageStream(AsyncCollectedStream[ImageEvent, ImageResult]):
    """`ImageStream` for `async for`. The request starts with the first event asked for."""


# --------------------------------------------------------------------------------------------------- requests, results


class _Made:
    """Events of one request on their way to an ImageResult."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._pictures: dict[int, MadePicture] = {}
        self._done: Done | None = None

    def add(self, event: PictureEvent) -> ImageEvent | None:
        """Take one event; gives what the caller hears of it. Raises what ended the request early."""
        match event:
            case PictureProgress():
                # A preview comes some steps late; progress never goes back.
                step = self._steps[event.index] = max(event.step, self._steps.get(event.index, 0))
                preview = None if event.preview is None else _image(event.preview)
                return ImageProgress(index=event.index, step=step, num_steps=event.num_steps, preview=preview)
            case FinishedPicture():
                made = MadePicture(index=event.index, seed=event.seed, image=_image(event.pixels))
                made.image.info["seed"] = event.seed
                self._pictures[event.index] = made
                return made
            case Done():
                self._done = event
            case Failed():
                raise from_info(event.error)
            case Aborted():
                raise Unavailable(f"the request was aborted: {event.reason}", code="aborted")
        return None

    def result(self) -> ImageResult:
        assert self._done is not None, "a request ends in exactly one terminal event"
        timing = self._done.timing
        return ImageResult(
            pictures=tuple(self._pictures[index] for index in sorted(self._pictures)),
            usage=self._done.usage,
            timing=ImageTiming(queue_s=timing.queue_s, first_picture_s=timing.first_token_s, total_s=timing.total_s),
        )


async def _collect(hub: Hub, request: PaintRequest) -> ImageResult:
    made = _Made()
    stream = hub.pictures.stream(await hub.pictures.prepare(request))
    try:
        async for event in stream:
            made.add(event)
    finally:
        await stream.aclose()
    return made.result()


def _images(result: ImageResult) -> Image | list[Image]:
    images = result.images
    return images[0] if len(images) == 1 else images


def _image(pixels: Pixels) -> Image:
    from PIL.Image import fromarray

    return fromarray(pixels)


def _request(model: str, prompt: object, n: object, options: ImageOptions) -> PaintRequest:
    """The frontend's request. Raises InvalidRequest for what cannot be asked."""
    given = _checked({"n": n, **options})
    size = parse_size(given.pop("size", None), given.pop("width", None), given.pop("height", None))
    source = given.pop("image", None)
    image = None if source is None else _opener(source)
    return PaintRequest(model=model, prompt=_text("prompt", prompt), size=size, image=image, **given)


_INTEGERS = frozenset({"n", "width", "height", "steps", "seed", "num_previews", "priority"})
_NUMBERS = frozenset({"guidance_scale", "strength"})
_TEXTS = frozenset({"negative_prompt", "solver"})


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Options of known names and kinds, without those that are None."""
    known = {"n", *ImageOptions.__annotations__}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown option {name!r}{hint}", param=name)
        if value is None:
            continue
        if name in _INTEGERS:
            value = int(_kind(name, value, numbers.Integral, "a whole number"))
        elif name in _NUMBERS:
            value = _kind(name, value, numbers.Real, "a number")
            value = float(value) if abs(value) < 1e300 or value != value else math.inf  # inf: refused with its reason
        elif name in _TEXTS:
            value = _text(name, value)
        found[name] = value
    return found


def _text(name: str, value: object) -> str:
    text: str = _kind(name, value, str, "a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = f"{name}: not valid Unicode: a lone surrogate at character {error.start}"
        raise InvalidRequest(why, param=name) from None
    return text


def _kind(name: str, value: Any, kind: type, what: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InvalidRequest(f"{name}: expected {what}, got {type(value).__name__}", param=name)
    return value


def parse_size(
    size: str | Sequence[int] | None, width: int | None = None, height: int | None = None
) -> tuple[int, int] | None:
    """Width and height of "WxH", a pair, or both by themselves; None where nothing is given, or "auto".

    Raises InvalidRequest. Which sizes there are is the model's to say.
    """
    if size is None:
        if width is None and height is None:
            return None
        if width is None or height is None:
            name = "width" if width is None else "height"
            raise InvalidRequest(
                f"{name}: expected with {'height' if width is None else 'width'}, got none", param=name
            )
        pair: Sequence[Any] = (width, height)
    elif width is not None or height is not None:
        raise InvalidRequest("size: expected alone, or width and height in its place", param="size")
    elif size == "auto":
        return None
    else:
        pair = size.lower().split("x") if isinstance(size, str) else size
    try:
        found = tuple(int(_side(side)) for side in pair)
    except (TypeError, ValueError):
        found = ()
    if len(found) != 2 or min(found) < 1:
        raise InvalidRequest(f"size: expected WIDTHxHEIGHT, got {_shown(size or pair)}", param="size")
    return found[0], found[1]


def _side(side: Any) -> int | str:
    if isinstance(side, str) and side.isascii() and side.isdigit() and len(side) < 6:
        return side
    if isinstance(side, (int, np.integer)) and not isinstance(side, bool):
        return int(side)
    raise ValueError


def _shown(size: object) -> str:
    return repr(size)[:40]


# ----------------------------------------------------------------------------------------------- a picture to begin with


def _opener(source: object) -> OpenImage:
    """Opens the picture, once for all prompts of a call, when its size is known."""
    lock = asyncio.Lock()
    opened: list[Pixels] = []

    async def open_image(width: int, height: int) -> Pixels:
        async with lock:
            if not opened:
                opened.append(await asyncio.to_thread(_pixels, source, width, height))
        return opened[0]

    return open_image


def _pixels(source: object, width: int, height: int) -> Pixels:
    """uint8 [height, width, 3] of a picture in any of its forms. Raises InvalidRequest."""
    import PIL.Image

    from .picture_file import fit, open_picture

    if isinstance(source, (str, os.PathLike)):
        return open_picture(_read(Path(source)), width, height)
    if isinstance(source, bytes):
        return open_picture(source, width, height)
    if isinstance(source, PIL.Image.Image):
        try:
            if min(source.size):
                return fit(source, width, height)
        except (OSError, ValueError, SyntaxError) as error:  # its file is read only now
            why = f"image: this picture cannot be read ({type(error).__name__})"
            raise InvalidRequest(why, param="image") from None
        raise InvalidRequest("image: expected a picture with pixels, got none", param="image")
    if not isinstance(source, np.ndarray):
        raise InvalidRequest(
            f"image: expected a path, bytes, a PIL image or an array, got {type(source).__name__}", param="image"
        )
    if (
        source.dtype != np.uint8
        or source.ndim not in (2, 3)
        or source.shape[2:] not in ((), (3,), (4,))
        or not source.size
    ):
        raise InvalidRequest(
            f"image: expected uint8 [H, W], [H, W, 3] or [H, W, 4], got {source.dtype} {list(source.shape)}",
            param="image",
        )
    return fit(PIL.Image.fromarray(np.ascontiguousarray(source)), width, height)


def _read(path: Path) -> bytes:
    from .picture_file import MAX_BYTES

    try:
        if not path.is_file():
            raise InvalidRequest(f"image: there is no file {path}", param="image")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # what is too large is refused by its length
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"image: {path}: {getattr(error, 'strerror', None) or error}", param="image") from None

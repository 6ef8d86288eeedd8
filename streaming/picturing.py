"""From a request's words to pictures and back: parameters, the picture to begin from, events, usage, metrics, files.

Does not know how an answer looks on the wire.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from ..engine.errors import InvalidRequest, Overloaded, from_info
from ..engine.frontend.pictures import (
    FinishedPicture,
    OpenImage,
    PaintRequest,
    PictureEvent,
    PictureProgress,
    Pixels,
    PreparedPictures,
)
from ..engine.types import Aborted, Done, Failed
from ..pipelines.picture_file import PictureFormat, encode
from .config import ServedModel
from .exchange import new_id, stopped_error
from .picture_words import ImageCreate, InputDetails, PictureUsage
from .service import Service

_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")
_FETCHED = re.compile(r"(?i)(https?|file|ftp)://")


class Picturing:
    """One request for pictures, and what has come of it so far."""

    def __init__(self, service: Service, model: ServedModel, request: ImageCreate, *, started: float) -> None:
        """Raises InvalidRequest for what can be seen without the model."""
        self.service = service
        self.model = model
        self.started = started  # perf_counter when it was asked for
        self.done: Done | None = None
        self.prepared: PreparedPictures | None = None
        self._num_bytes = len(request.image or "")
        self._quiet_until = started + service.config.sse_keep_alive_s
        self.request = PaintRequest(
            request_id=new_id("image"),
            model=model.id,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt or "",
            size=_size(request.size),
            n=request.n or 1,
            steps=request.steps,
            guidance_scale=request.guidance_scale,
            solver=request.solver,
            seed=request.seed,
            image=None if request.image is None else _opener(service, request.image),
            strength=request.strength,
            num_previews=request.partial_images or 0,
        )

    async def prepare(self) -> PreparedPictures:
        """Load the model, check the request against its card, open its picture. Raises MotetError; Overloaded also when too
        many bytes of pictures wait to be opened."""
        service = self.service
        if service.picture_bytes + self._num_bytes > service.config.max_pictures_bytes:
            raise Overloaded("other pictures that are to be opened take all the room there is", retry_after_s=2.0)
        service.picture_bytes += self._num_bytes
        try:
            self.prepared = await service.pictures.prepare(self.request)
            return self.prepared
        finally:
            self.request = replace(self.request, image=None)  # it was large, and the engine has what it needs of it
            service.picture_bytes -= self._num_bytes

    async def events(
        self, stop_reason: Callable[[], str], on_silence: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[PictureProgress | FinishedPicture, None]:
        """Progress and pictures as they come. Leaving early, or being cancelled, ends the request in the engine.

        `stop_reason` says why a cancellation came; `on_silence` is called now and then. Raises MotetError for what failed
        in the engine.
        """
        assert self.prepared is not None
        metrics, model = self.service.metrics, self.model.id
        meters = metrics.meters(model)
        events = self.service.pictures.stream(self.prepared)
        metrics.observe_submitted(model, n=self.request.n, max_tokens=None)
        num_pictures = 0
        try:
            while (event := await self._next(events, on_silence)) is not None:
                since_s = time.perf_counter() - self.started
                if isinstance(event, FinishedPicture):
                    if not num_pictures:
                        meters.first_token.observe(since_s)
                    num_pictures += 1
                    metrics.observe_picture(model, since_s)
                    yield event
                elif isinstance(event, PictureProgress):
                    yield event
                elif isinstance(event, Done):
                    self.done = event
                    metrics.observe_done(model, event.finish_reason, event.usage, event.timing, since_s)
                elif isinstance(event, Failed):
                    metrics.observe_failed(model, event.error.code)
                    raise from_info(event.error)
                elif isinstance(event, Aborted):
                    metrics.observe_aborted(model, event.reason)
                    raise stopped_error(event.reason)
        except (asyncio.CancelledError, GeneratorExit):
            if self.done is None:
                metrics.observe_aborted(model, stop_reason())
            raise
        finally:
            await events.aclose()

    async def _next(
        self, events: AsyncGenerator[PictureEvent, None], on_silence: Callable[[], Awaitable[None]] | None
    ) -> PictureEvent | None:
        """The next event, None after the last. The wait for it is never cancelled by the clock."""
        if on_silence is None:
            return await anext(events, None)
        pending = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                ready, _ = await asyncio.wait({pending}, timeout=max(self._quiet_until - time.perf_counter(), 0.0))
                if time.perf_counter() >= self._quiet_until:
                    await on_silence()
                    self._quiet_until = time.perf_counter() + self.service.config.sse_keep_alive_s
                if ready:
                    return pending.result()
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})

    @property
    def usage(self) -> PictureUsage:
        """All of it, once the request is done."""
        if self.done is None:
            return PictureUsage()
        usage = self.done.usage
        return PictureUsage(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputDetails(text_tokens=usage.num_prompt_tokens),
            output_tokens=usage.num_output_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


async def in_base64(pixels: Pixels, kind: PictureFormat, compression: int) -> str:
    """A picture as a file, in base64. Made in a thread: a large one takes a second."""

    def work() -> str:
        return base64.b64encode(encode(pixels, kind, compression)).decode()

    return await asyncio.to_thread(work)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None or text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"size: expected 'auto' or 'WIDTHxHEIGHT', got {text!r}", param="size")
    return int(found[1]), int(found[2])


def _opener(service: Service, text: str) -> OpenImage:
    """What opens the picture in a request: in the decoder's process, a few at a time."""

    async def open_image(width: int, height: int) -> Pixels:
        async with service.picture_decodes:
            data = await asyncio.to_thread(_file_in, text)
            return await service.decoder.open_picture(data, width, height)

    return open_image


def _file_in(text: str) -> bytes:
    """The bytes of a file in base64, bare or as a data URL."""
    if _FETCHED.match(text):
        raise InvalidRequest(
            "image: addresses are not opened; send the file itself in base64", param="image", code="invalid_image"
        )
    head, comma, data = text.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise InvalidRequest("image: expected base64, or a data URL of it", param="image", code="invalid_image")
    try:
        return base64.b64decode(data if comma else text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            "image: expected base64, or a data URL of it", param="image", code="invalid_image"
        ) from None

"""POST /v1/images/generations: a prompt becomes pictures, whole or as events with what they look like on the way.

Whatever can be wrong with a request is found before the status line. Pictures become files in threads, and the one to begin
from is opened in a process of its own.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from ..engine.frontend.pictures import FinishedPicture, PictureProgress, Pixels
from ..pipelines.picture_file import PictureFormat
from .config import DEFAULT_MODEL
from .exchange import DONE, KEEP_ALIVE, Exchange
from .picture_words import (
    ImageCompleted,
    ImageCreate,
    ImagesResponse,
    PartialImage,
    PictureBody,
    PictureUsage,
    refuse_unsupported,
)
from .picturing import Picturing, in_base64
from .protocol import encode

_decoder = msgspec.json.Decoder(ImageCreate)


async def generations(exchange: Exchange) -> None:
    request = await exchange.read_json(_decoder)
    await exchange.watched(_answer(exchange, request))


async def _answer(exchange: Exchange, request: ImageCreate) -> None:
    service = exchange.service
    model = service.model(request.model or DEFAULT_MODEL, "image")
    exchange.model = model.id
    refuse_unsupported(request)
    picturing = Picturing(service, model, request, started=exchange.started)
    request.image = None  # many may wait, and each would be kept until its request ends
    ticket = service.admission.admit(picturing.request.n, len(request.prompt))
    try:
        order = (await picturing.prepare()).order
        exchange.engine_ids.append(picturing.request.request_id)
        kind: PictureFormat = request.output_format or "png"
        compression = 100 if request.output_compression is None else request.output_compression
        answer = _Answer(exchange, picturing, f"{order.width}x{order.height}", kind, compression)
        events = picturing.events(
            lambda: exchange.stop_reason or "shutdown", answer.keep_alive if request.stream else None
        )
        async with contextlib.aclosing(events):
            async for event in events:
                ticket.leave()
                if request.stream:
                    await answer.stream(event)
                elif isinstance(event, FinishedPicture):
                    await answer.collect(event)
        await (answer.end_stream() if request.stream else answer.send())
    finally:
        ticket.leave()


class _Answer:
    """One answer, whole or streamed."""

    def __init__(
        self, exchange: Exchange, picturing: Picturing, size: str, kind: PictureFormat, compression: int
    ) -> None:
        self.exchange = exchange
        self.picturing = picturing
        self.size = size
        self.kind = kind
        self.compression = compression
        self._created = int(time.time())
        self._pictures: dict[int, PictureBody] = {}
        self._num_partial: dict[int, int] = {}
        self._num_finished = 0
        self._last: ImageCompleted | None = None  # the last one to be finished waits for the usage

    async def _file(self, pixels: Pixels) -> str:
        return await in_base64(pixels, self.kind, self.compression)

    # whole

    async def collect(self, picture: FinishedPicture) -> None:
        self._pictures[picture.index] = PictureBody(b64_json=await self._file(picture.pixels), seed=picture.seed)

    async def send(self) -> None:
        body = ImagesResponse(
            created=self._created,
            data=[self._pictures[index] for index in sorted(self._pictures)],
            usage=self.picturing.usage,
            size=self.size,
            output_format=self.kind,
        )
        await self.exchange.send_struct(body)

    # streamed

    async def _begin(self) -> None:
        if not self.exchange.streaming:
            await self.exchange.start_stream()

    async def keep_alive(self) -> None:
        await self._begin()
        await self.exchange.write(KEEP_ALIVE)

    async def stream(self, event: PictureProgress | FinishedPicture) -> None:
        """Tell an event. With the first one the request runs, and the client is told so."""
        await self._begin()
        if isinstance(event, FinishedPicture):
            completed = ImageCompleted(
                b64_json=await self._file(event.pixels),
                created_at=int(time.time()),
                size=self.size,
                output_format=self.kind,
                usage=PictureUsage(),
                seed=event.seed,
                index=event.index,
            )
            self._num_finished += 1
            if self._num_finished < self.picturing.request.n:
                await self._write(completed)
            else:
                self._last = completed
        elif event.preview is not None:
            number = self._num_partial.get(event.index, 0)
            self._num_partial[event.index] = number + 1
            await self._write(
                PartialImage(
                    b64_json=await self._file(event.preview),
                    partial_image_index=number,
                    created_at=int(time.time()),
                    size=self.size,
                    output_format=self.kind,
                    index=event.index,
                )
            )

    async def end_stream(self) -> None:
        assert self._last is not None
        await self._write(msgspec.structs.replace(self._last, usage=self.picturing.usage))
        await self.exchange.end_stream(DONE)

    async def _write(self, event: PartialImage | ImageCompleted) -> None:
        await self.exchange.write(b"event: %s\ndata: %s\n\n" % (event.type.encode(), encode(event)))

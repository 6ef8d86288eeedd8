"""Files read in processes of their own, for a server: PCM comes back piece by piece, pixels whole, and a bad file harms nobody.

    decoder = DecoderProcess()
    async for pcm in decoder.decode(file, limits, encoding="s16"): ...
    pixels = await decoder.open_picture(data, width, height)
    await decoder.close()

`decode_blocks` of media.py and `open_picture` of picture_file.py do the work, in a child forked for each file by one
prepared process (decoder_worker.py). What is not taken yet waits in a pipe of bounded size, so a file of any length costs
little memory here. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import IO

import numpy as np

from ..engine.errors import InvalidRequest, Unavailable
from .decoder_worker import DONE, FRAME, ORDER, PCM, PIECE, REFUSED
from .media import Encoding, MediaLimits
from .picture_file import MAX_BYTES, Pixels

_TRIES = 2  # when the process is found ended
_MOST_BYTES = 4 * PIECE  # of a frame; a child that says more is not believed
_BROKEN = "unsupported_media"


@dataclass(frozen=True, kw_only=True)
class DecoderLimits:
    """What reading one file may cost, beyond `MediaLimits`."""

    cpu_s: float = 60.0  # of processor time, and...
    cpu_per_second: float = 1 / 50  # ...this much more per second that the audio may last
    patience: float = 10.0  # time, in processor time: others compute too, and the reader may be slow
    memory: int = 512 * 1024 * 1024  # bytes, besides the program itself
    picture_cpu_s: float = 20.0  # of processor time for a picture


class DecoderProcess:
    """Starts its process at the first file and again when it ended. `close` it."""

    def __init__(self, limits: DecoderLimits | None = None) -> None:
        self._limits = limits or DecoderLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def decode(
        self, file: IO[bytes], limits: MediaLimits, *, encoding: Encoding = "s16"
    ) -> AsyncGenerator[bytes, None]:
        """The sound of an open file with a descriptor, as PCM in pieces of `PIECE` bytes (the last is shorter).

        16 kHz mono, little-endian, "s16" or "f32". Raises what `decode_audio` raises, maybe after some pieces;
        code "unsupported_media" also when reading the file broke or outlasted its reader. Leaving early (aclose,
        cancel) ends the child.
        """
        cpu_s = self._limits.cpu_s + self._limits.cpu_per_second * limits.max_seconds
        reader, pipe = await self._begin(file, limits, encoding, cpu_s)
        num_bytes = 0
        try:
            while (data := await _piece(reader)) is not None:
                num_bytes += len(data)
                if num_bytes > limits.max_pcm_bytes:  # the child should have said so
                    raise _broken()
                yield data
        finally:
            pipe.close()

    async def open_picture(self, data: bytes, width: int, height: int, *, max_bytes: int = MAX_BYTES) -> Pixels:
        """`open_picture` of picture_file.py: uint8 [height, width, 3]. Raises what that raises, all with param "image"; code
        "invalid_image" also when reading the file broke. Being cancelled ends the child."""
        num_bytes = width * height * 3
        limits = MediaLimits(max_input_bytes=max_bytes, max_pcm_bytes=num_bytes)
        kept = bytearray()
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(_write, file, data)
            reader, pipe = await self._begin(file, limits, "s16", self._limits.picture_cpu_s, (width, height))
            try:
                while (piece := await _piece(reader)) is not None and len(kept) < num_bytes:
                    kept += piece
            except InvalidRequest as error:
                if error.code != _BROKEN:
                    raise InvalidRequest(error.message, param="image", code=error.code) from None
                kept.clear()
            finally:
                pipe.close()
        if len(kept) != num_bytes:
            raise InvalidRequest(
                "image: it cannot be decoded: reading it failed, or took too much time or memory",
                param="image",
                code="invalid_image",
            )
        return np.frombuffer(kept, np.uint8).reshape(height, width, 3)

    async def close(self) -> None:
        """End the process. A file that is being read is read on until its reader leaves."""
        await self._give_up(self._process)

    async def _give_up(self, process: subprocess.Popen[bytes] | None) -> None:
        """End this process, if nobody has done so."""
        if process is not self._process:
            return
        self._process = None
        if self._orders is not None:
            self._orders.close()  # it ends when its socket does
            self._orders = None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, 2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)

    async def _begin(
        self,
        file: IO[bytes],
        limits: MediaLimits,
        encoding: Encoding,
        cpu_s: float,
        size: tuple[int, int] = (0, 0),
    ) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
        """Order a child; what it says can be read from now on. Raises Unavailable."""
        order = ORDER.pack(
            limits.max_input_bytes, limits.max_seconds, limits.max_pcm_bytes, encoding == "s16", int(cpu_s) + 1,
            cpu_s * self._limits.patience, self._limits.memory, *size,
        )  # fmt: skip
        for _ in range(_TRIES):
            try:
                reader, pipe = await _connected(self._order(order, file))
            except OSError:
                await self._give_up(self._process)
                continue
            process = self._process
            try:
                await reader.readexactly(FRAME.size)
                return reader, pipe
            except asyncio.IncompleteReadError:  # it ended with the order in its hands, which is not the file's fault
                pipe.close()
                await self._give_up(process)
            except BaseException:
                pipe.close()
                raise
        raise Unavailable("files cannot be read now", retry_after_s=5.0)

    def _order(self, order: bytes, file: IO[bytes]) -> int:
        """Send an order; gives the end of its pipe that is ours. Raises OSError."""
        orders = self._running()
        ours, theirs = os.pipe()
        try:
            socket.send_fds(orders, [order], [file.fileno(), theirs])
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return ours

    def _running(self) -> socket.socket:
        """The socket of a living process. Raises OSError when there can be none."""
        if self._process is not None and self._process.poll() is None and self._orders is not None:
            return self._orders
        if self._orders is not None:
            self._orders.close()
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "motet.pipelines.decoder_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # One thread: it forks.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        return self._orders


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


async def _connected(pipe: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A descriptor as a stream that is read no faster than it is taken."""
    reader = asyncio.StreamReader(limit=2 * PIECE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, open(pipe, "rb"))
    return reader, transport


async def _piece(reader: asyncio.StreamReader) -> bytes | None:
    """The next PCM, None at the end. The child may be in a stranger's hands: nothing that it says is believed."""
    try:
        kind, size = FRAME.unpack(await reader.readexactly(FRAME.size))
        if size > _MOST_BYTES:
            raise _broken()
        data = await reader.readexactly(size)
        if kind == REFUSED:
            message, code = json.loads(data)
            raise InvalidRequest(str(message)[:300], param="file", code=str(code)[:50])
    except (asyncio.IncompleteReadError, ValueError, TypeError) as error:
        raise error if isinstance(error, InvalidRequest) else _broken() from None
    if kind not in (PCM, DONE):
        raise _broken()
    return data if kind == PCM else None


def _broken() -> InvalidRequest:
    return InvalidRequest(
        "the file cannot be decoded: reading it failed, or took too much time or memory",
        param="file",
        code=_BROKEN,
    )

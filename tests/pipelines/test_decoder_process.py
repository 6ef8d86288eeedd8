"""Files read in a process of their own: the same samples, and ends of every kind that harm nobody."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

import pytest

from motet.engine.errors import InvalidRequest, Unavailable
from motet.pipelines import decoder_process
from motet.pipelines.decoder_process import DecoderLimits, DecoderProcess
from motet.pipelines.decoder_worker import DONE, FRAME, PCM, PIECE, REFUSED
from motet.pipelines.media import Encoding, MediaLimits, decode_pcm

from .sound_files import encoded, tone


def on_disk(data: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()
    file.write(data)
    file.flush()
    return file


def run(work: Callable[[DecoderProcess], Awaitable[Any]], limits: DecoderLimits | None = None) -> Any:
    async def whole() -> Any:
        decoder = DecoderProcess(limits)
        try:
            return await work(decoder)
        finally:
            await decoder.close()

    return asyncio.run(whole())


async def pcm_of(decoder: DecoderProcess, data: bytes, *, encoding: Encoding = "s16", **limits: Any) -> list[bytes]:
    with on_disk(data) as file:
        return [piece async for piece in decoder.decode(file, MediaLimits(**limits), encoding=encoding)]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_samples_are_those_of_media() -> None:
    files = [
        encoded(tone(2, 44_100)[None], 44_100, "mp3", "libmp3lame"),
        encoded(tone(40, 16_000)[None], 16_000, "wav", "pcm_s16le"),
        encoded(tone(0.1, 48_000)[None], 48_000, "webm", "libopus"),
    ]

    async def work(decoder: DecoderProcess) -> None:
        for encoding in ("s16", "f32"):
            for file in files:
                pieces = await pcm_of(decoder, file, encoding=encoding)
                assert b"".join(pieces) == decode_pcm(file, encoding=encoding)
                assert all(PIECE <= len(piece) <= 2 * PIECE for piece in pieces[:-1])
        together = await asyncio.gather(*(pcm_of(decoder, files[0]) for _ in range(5)))
        assert all(b"".join(pieces) == decode_pcm(files[0]) for pieces in together)
        spooled = tempfile.SpooledTemporaryFile(max_size=1 << 20)  # as uploads are kept
        spooled.write(files[0])
        found = [piece async for piece in decoder.decode(spooled, MediaLimits())]
        spooled.close()
        assert b"".join(found) == decode_pcm(files[0])

    run(work)


@pytest.mark.parametrize(
    ("data", "limits", "code"),
    [
        (b"nothing" * 1000, {}, "unsupported_media"),
        (b"", {}, "empty_audio"),
        (encoded(tone(3, 16_000)[None], 16_000, "wav", "pcm_s16le"), {"max_seconds": 2.0}, "audio_too_long"),
        (encoded(tone(3, 16_000)[None], 16_000, "wav", "pcm_s16le"), {"max_pcm_bytes": 9000}, "audio_too_large"),
        (encoded(tone(3, 16_000)[None], 16_000, "wav", "pcm_s16le"), {"max_input_bytes": 9000}, "audio_too_large"),
    ],
)
def test_refusals_keep_their_words(data: bytes, limits: dict[str, Any], code: str) -> None:
    async def work(decoder: DecoderProcess) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await pcm_of(decoder, data, **limits)
        with pytest.raises(InvalidRequest) as here:
            decode_pcm(io.BytesIO(data), MediaLimits(**limits))
        assert (caught.value.code, caught.value.message, caught.value.param) == (code, here.value.message, "file")

    run(work)


LONG = encoded(tone(600, 8_000)[None], 8_000, "flac", "flac")


@pytest.mark.parametrize(
    "limits",
    [
        DecoderLimits(cpu_s=1e-3, cpu_per_second=0.0, patience=1.0),  # a millisecond in all
        DecoderLimits(memory=0),
    ],
)
def test_a_reader_out_of_bounds_is_ended(limits: DecoderLimits) -> None:
    async def work(decoder: DecoderProcess) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequest) as caught:
                await pcm_of(decoder, LONG)
            assert caught.value.code == "unsupported_media"

    run(work, limits)


def test_a_killed_reader_fails_its_file_only() -> None:
    async def work(decoder: DecoderProcess) -> None:
        with on_disk(LONG) as one, on_disk(LONG) as other:
            first = decoder.decode(one, MediaLimits())
            await anext(first)
            assert decoder.pid is not None
            (victim,) = children(decoder.pid)
            second = decoder.decode(other, MediaLimits())
            await anext(second)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(InvalidRequest, match="cannot be decoded"):
                async for _ in first:
                    pass
            assert sum([len(piece) async for piece in second]) > 500 * 16_000 * 2
            # Nor does the end of the process itself last.
            os.kill(decoder.pid, signal.SIGKILL)
        assert b"".join(await pcm_of(decoder, LONG, max_seconds=700.0)) == decode_pcm(LONG)

    run(work)


def test_leaving_early_ends_the_reader() -> None:
    async def work(decoder: DecoderProcess) -> None:
        with on_disk(LONG) as file:
            pieces = decoder.decode(file, MediaLimits())
            await anext(pieces)
            assert decoder.pid is not None and len(children(decoder.pid)) == 1
            await pieces.aclose()
        for _ in range(500):
            if not children(decoder.pid):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the reader goes on")

    run(work)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        FRAME.pack(PCM, 10) + b"short",
        FRAME.pack(PCM, 1 << 31),
        FRAME.pack(b"?", 0),
        FRAME.pack(REFUSED, 3) + b"{}}",
        FRAME.pack(REFUSED, 1) + b"7",
        (FRAME.pack(PCM, PIECE) + bytes(PIECE)) * 3 + FRAME.pack(DONE, 0),  # more than was asked for
    ],
)
def test_what_a_reader_says_is_not_believed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(*_: object) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        reader.feed_eof()
        return reader, asyncio.BaseTransport.__new__(Closable)

    async def work(decoder: DecoderProcess) -> None:
        monkeypatch.setattr(decoder, "_begin", begin)
        with pytest.raises(InvalidRequest) as caught:
            await pcm_of(decoder, b"x", max_pcm_bytes=2 * PIECE)
        assert caught.value.code == "unsupported_media"

    run(work)


class Closable(asyncio.BaseTransport):
    def close(self) -> None:
        pass


def test_no_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    async def work(decoder: DecoderProcess) -> None:
        monkeypatch.setattr(decoder_process.subprocess, "Popen", refuse)
        with pytest.raises(Unavailable):
            await pcm_of(decoder, LONG)

    run(work)


def test_a_confined_process_writes_no_files(tmp_path: Path) -> None:
    code = f"""
import resource
from motet.pipelines.decoder_worker import confine
confine(cpu_s=5, memory=100_000_000)
try:
    open({str(tmp_path / "file")!r}, "wb", buffering=0).write(b"x")
except OSError as error:
    print("no file", error.errno)
try:
    bytes(200_000_000)
except MemoryError:
    print("no memory")
print(resource.getrlimit(resource.RLIMIT_CPU))
"""
    # SIGXFSZ is ignored by Python: the write fails.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == ["no file 27", "no memory", "(5, 5)"]


def test_closing_ends_the_process() -> None:
    async def work(decoder: DecoderProcess) -> int:
        await pcm_of(decoder, LONG)
        assert decoder.pid is not None
        return decoder.pid

    pid = run(work)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.01)
    raise AssertionError("it is still there")

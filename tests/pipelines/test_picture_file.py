"""Pixels to files and back, and files that no one should open: here, and in the process that a server opens them in."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from motet.engine.errors import InvalidRequest
from motet.pipelines.decoder_process import DecoderLimits, DecoderProcess
from motet.pipelines.picture_file import CONTENT_TYPES, encode, open_picture

from .picture_files import BROKEN, GREEN, RED, TOO_LARGE, WHITE, halves, png_of_zeros, saved


def refusal(data: bytes, **limits: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        open_picture(data, 16, 16, **limits)
    assert caught.value.param == "image" and len(caught.value.message) < 200
    return caught.value


# ------------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("kind", list(CONTENT_TYPES))
def test_there_and_back(kind: Any) -> None:
    data = encode(halves(), kind)
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.size, image.mode) == (kind.upper(), (32, 16), "RGB")
    again = open_picture(data, 32, 16)
    assert (again.dtype, again.shape) == (np.uint8, (16, 32, 3))
    assert np.abs(again.astype(int) - halves())[:, [4, 12, 20, 28]].max() <= (0 if kind == "png" else 12)
    assert encode(halves(), kind) == data


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_a_lower_quality_is_a_smaller_file(kind: Any) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    sizes = [len(encode(noise, kind, quality)) for quality in (0, 50, 95, 100)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] / 3


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ((halves(), "gif"), "output_format"),
        ((halves(), "jpeg", 101), "output_compression"),
        ((halves(), "webp", -1), "output_compression"),
        ((halves()[..., 0], "png"), None),
        ((halves().astype(np.float32), "png"), None),
        ((halves()[:0], "png"), None),
    ],
)
def test_what_cannot_be_written(arguments: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(*arguments)
    assert caught.value.param == param


# ------------------------------------------------------------------------------------------------------------ reading


def test_the_middle_is_kept() -> None:
    picture = np.concatenate([np.full((16, 16, 3), 0, np.uint8), halves(32, 16), np.full((16, 16, 3), 0, np.uint8)], 1)
    assert np.array_equal(open_picture(encode(picture), 32, 16), halves(32, 16))
    half = open_picture(encode(picture), 16, 8).astype(int)
    assert half.shape == (8, 16, 3) and np.abs(half[4, 4] - RED).max() < 4 and np.abs(half[4, 11] - GREEN).max() < 4
    double = open_picture(encode(halves(32, 16).transpose(1, 0, 2)), 64, 64)
    assert double.shape == (64, 64, 3) and tuple(double[2, 2]) == RED and tuple(double[-3, 60]) == GREEN


def test_what_is_transparent_becomes_white() -> None:
    image = Image.fromarray(halves()).convert("RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(16)[:, None] < 8, 255, 0).repeat(32, 1).astype(np.uint8)))
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        pixels = open_picture(saved(image, kind, **options), 32, 16)
        assert tuple(pixels[2, 2]) == RED and tuple(pixels[2, 30]) == GREEN and tuple(pixels[14, 2]) == WHITE
    palette = Image.fromarray(halves()).quantize(4)
    assert tuple(open_picture(saved(palette, transparency=palette.getpixel((0, 0))), 32, 16)[0, 0]) == WHITE


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_way_to_store_a_pixel(mode: str) -> None:
    grey = np.full((16, 16), 200, np.uint8)
    grey[:, 8:] = 40
    if mode == "I;16":
        data = saved(Image.fromarray(grey.astype(np.uint16) * 257))
    else:
        data = saved(Image.fromarray(grey).convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    pixels = open_picture(data, 16, 16)
    assert pixels.shape == (16, 16, 3)
    if mode != "1":  # which is dithered
        assert abs(int(pixels[8, 3, 0]) - 200) < 4 and abs(int(pixels[8, 12, 2]) - 40) < 4


def test_a_camera_that_was_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees, clockwise
    data = saved(Image.fromarray(halves()), "JPEG", exif=exif, quality=95, subsampling=0)
    pixels = open_picture(data, 16, 32).astype(int)
    assert np.abs(pixels[4, 8] - RED).max() < 12 and np.abs(pixels[28, 8] - GREEN).max() < 12


def test_a_large_photograph_is_read_at_a_part_of_its_size() -> None:
    data = encode(halves(4096, 2048), "jpeg", 95)
    pixels = open_picture(data, 64, 64).astype(int)
    assert np.abs(pixels[32, 8] - RED).max() < 12 and np.abs(pixels[32, 56] - GREEN).max() < 12


def test_of_an_animation_the_first_picture() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN)]
    for kind in ("PNG", "WEBP"):
        options = {"save_all": True, "append_images": frames[1:], **({"lossless": True} if kind == "WEBP" else {})}
        assert tuple(open_picture(saved(frames[0], kind, **options), 16, 16)[8, 8]) == RED


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_files(name: str) -> None:
    error = refusal(BROKEN[name])
    assert error.code == "invalid_image" and "/" not in error.message and "0x" not in error.message


@pytest.mark.parametrize("name", list(TOO_LARGE))
def test_bombs(name: str) -> None:
    assert len(TOO_LARGE[name]) < 100_000
    assert refusal(TOO_LARGE[name]).code == "image_too_large"


def test_a_file_of_too_many_bytes() -> None:
    assert refusal(encode(halves()), max_bytes=50).code == "image_too_large"


def test_every_cut_and_some_flips_of_a_file_are_pictures_or_refusals() -> None:
    rng = np.random.default_rng(1)
    for kind in CONTENT_TYPES:
        whole = encode(halves(), kind)  # type: ignore[arg-type]
        cases = [whole[:cut] for cut in range(0, len(whole), 7)]
        for _ in range(100):
            flipped = bytearray(whole)
            flipped[rng.integers(len(whole))] = rng.integers(256)
            cases.append(bytes(flipped))
        for data in cases:
            try:
                assert open_picture(data, 8, 8).shape == (8, 8, 3)
            except InvalidRequest as error:
                assert error.param == "image"


def test_pillow_is_imported_only_where_it_is_used() -> None:
    code = "import sys, motet.pipelines.decoder_worker, motet.streaming.server; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------- in a process of its own


def run(work: Callable[[DecoderProcess], Awaitable[Any]], limits: DecoderLimits | None = None) -> Any:
    async def whole() -> Any:
        decoder = DecoderProcess(limits)
        try:
            return await work(decoder)
        finally:
            await decoder.close()

    return asyncio.run(whole())


def test_the_process_gives_the_same_pixels_and_the_same_refusals() -> None:
    async def work(decoder: DecoderProcess) -> None:
        large = encode(halves(900, 700), "jpeg", 90)  # several pieces
        for data, width, height in ((encode(halves()), 32, 16), (large, 900, 700), (large, 64, 64)):
            assert np.array_equal(await decoder.open_picture(data, width, height), open_picture(data, width, height))
        for data in [*BROKEN.values(), *TOO_LARGE.values()]:
            with pytest.raises(InvalidRequest) as caught:
                await decoder.open_picture(data, 16, 16)
            expected = refusal(data)
            found = caught.value
            assert (found.param, found.code, found.message) == ("image", expected.code, expected.message)
        together = await asyncio.gather(*(decoder.open_picture(large, 64, 64) for _ in range(4)))
        assert all(np.array_equal(pixels, together[0]) for pixels in together)

    run(work)


@pytest.mark.parametrize("limits", [DecoderLimits(memory=16 << 20), DecoderLimits(picture_cpu_s=1e-3, patience=1.0)])
def test_a_reader_out_of_bounds_is_ended(limits: DecoderLimits) -> None:
    largest = png_of_zeros(10_000, 3_900)

    async def work(decoder: DecoderProcess) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await decoder.open_picture(largest, 64, 64)
        assert (caught.value.param, caught.value.code) == ("image", "invalid_image")

    run(work, limits)


def test_the_largest_picture_fits_the_usual_bounds() -> None:
    async def work(decoder: DecoderProcess) -> None:
        for mode in ("RGBA", "RGB", "LA"):
            data = saved(
                Image.new(mode, (8_000, 5_000), {"RGBA": (*RED, 255), "RGB": RED, "LA": (229, 255)}[mode]),
                compress_level=1,
            )
            assert tuple((await decoder.open_picture(data, 64, 64))[32, 32])[:1] == RED[:1]

    run(work)


def test_a_killed_process_is_started_again() -> None:
    async def work(decoder: DecoderProcess) -> None:
        data = encode(halves())
        await decoder.open_picture(data, 32, 16)
        assert decoder.pid is not None
        os.kill(decoder.pid, signal.SIGKILL)
        assert np.array_equal(await decoder.open_picture(data, 32, 16), halves())

    run(work)

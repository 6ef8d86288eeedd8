"""Picture files made here: good ones, broken ones, and small ones that claim to be large."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from motet.pipelines.picture_file import MAX_PIXELS, MAX_SIDE, encode

RED, GREEN, WHITE = (229, 57, 53), (67, 160, 71), (255, 255, 255)


def halves(width: int = 32, height: int = 16) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Red on the left, green on the right."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :] = RED, GREEN
    return pixels


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_zeros(width: int, height: int, *, data: bytes | None = None) -> bytes:
    """A PNG that claims a size; without `data` it holds as many zeros as it should."""
    rows = bytes((width // 8 + 1) * height) if data is None else data
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


BROKEN = {
    "empty": b"",
    "text": b"this is not a picture" * 100,
    "signature": b"\x89PNG\r\n\x1a\n",
    "truncated png": encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))[:-3000],
    "truncated jpeg": encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "jpeg")[:1500],
    "truncated webp": encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "webp")[:1500],
    "no pixels": png_of_zeros(64, 64, data=b""),
    "flipped bits": bytes(byte ^ 255 if 100 < at < 300 else byte for at, byte in enumerate(encode(halves(64, 64)))),
    "no side": png_of_zeros(0, 16),
    "gif": saved(Image.new("RGB", (16, 16)), "GIF"),
    "tiff": saved(Image.new("RGB", (16, 16)), "TIFF"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
}
TOO_LARGE = {
    "bomb": png_of_zeros(20_000, 20_000),  # 50 kB
    "claims 2**31": png_of_zeros(2**31 - 1, 2**31 - 1, data=b"x"),
    "a long line": png_of_zeros(MAX_SIDE + 1, 1),
    "just over": png_of_zeros(10_000, MAX_PIXELS // 10_000 + 1),
}

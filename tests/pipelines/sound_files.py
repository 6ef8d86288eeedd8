"""Sound files for tests, written with PyAV: any container and codec, tones and silence, video with sound."""

from __future__ import annotations

import io
import struct
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]


def tone(seconds: float, rate: int, hz: float = 440.0, level: float = 0.4) -> Samples:
    return (level * np.sin(2 * np.pi * hz / rate * np.arange(round(seconds * rate)))).astype(np.float32)


def encoded(
    channels: Samples,
    rate: int,
    container: str,
    codec: str,
    *,
    layout: str = "mono",
    picture: bool = False,
) -> bytes:
    """`channels` [C, T] in [-1, 1] as a file; with `picture`, some frames of video come before the sound."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        if picture:
            video = out.add_stream("mpeg4", rate=10)
            video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        sound = out.add_stream(codec, rate=rate, layout=layout)
        if picture:
            for i in range(5):
                image = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * i, np.uint8), format="rgb24")
                image.pts, image.time_base = i, Fraction(1, 10)
                out.mux(video.encode(image))
            out.mux(video.encode(None))
        for start in range(0, channels.shape[1], rate):
            part = np.ascontiguousarray(channels[:, start : start + rate])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            out.mux(sound.encode(frame))
        out.mux(sound.encode(None))
    return file.getvalue()


def wav(
    data: bytes, *, rate: int = 16000, channels: int = 1, bits: int = 16, kind: int = 1, claimed: int | None = None
) -> bytes:
    """A WAV file that says whatever it is told to say. `claimed` is the length of `data` in its header."""
    size = channels * bits // 8
    header = struct.pack("<HHIIHH", kind, channels, rate, rate * size % (1 << 32), size, bits)
    length = len(data) if claimed is None else claimed
    body = b"WAVEfmt " + struct.pack("<I", len(header)) + header + b"data" + struct.pack("<I", length) + data
    return b"RIFF" + struct.pack("<I", (length + len(body) - len(data)) % (1 << 32)) + body

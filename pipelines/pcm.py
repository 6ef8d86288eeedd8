"""What the SDK takes as audio, made into what a recogniser hears: float32 samples, 16 kHz, mono. Torch-free.

Files and their bytes go through pipelines/media.py; samples are checked and converted here. `LivePCM` does the same for
pieces of any size: the samples that leave do not depend on where the pieces were cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import InvalidRequest
from .types import PCM, Audio

if TYPE_CHECKING:
    from .media import StreamResampler

RATE = 16_000  # of everything that leaves
PIECE = RATE  # samples of live audio in one message: a second
MAX_FILE_BYTES = 64 << 30  # of a file that the caller names himself: a film may be large, its sound is not
_RATES = (1_000, 768_000)


def read_pcm(audio: Audio, sample_rate: int = RATE) -> bytes:
    """One whole audio as little-endian float32 at 16 kHz; `sample_rate` is that of samples, files know their own.

    Raises InvalidRequest for what cannot be read or is no audio.
    """
    if isinstance(audio, np.ndarray):
        samples = _floats(audio)
        if sample_rate != RATE:
            resampler = _resampler(sample_rate)
            samples = np.concatenate([resampler.push(samples), resampler.finish()])
        return samples.tobytes()
    from .media import MediaLimits, decode_pcm  # brings the codecs: only where a file is read

    if isinstance(audio, (bytes, bytearray, memoryview)):
        return decode_pcm(audio, encoding="f32")
    path = Path(audio)
    if not path.is_file():
        raise InvalidRequest(f"audio: there is no file {os.fspath(audio)!r}", param="audio")
    return decode_pcm(path, MediaLimits(max_input_bytes=MAX_FILE_BYTES), encoding="f32")


class LivePCM:
    """Live audio on its way in: 16-bit bytes or samples of any rate become messages of float32 at 16 kHz."""

    def __init__(self, sample_rate: int = RATE) -> None:
        self._resampler = None if sample_rate == RATE else _resampler(sample_rate)
        self._half = b""  # the first byte of a sample whose second one is still to come

    def push(self, piece: PCM) -> Iterator[bytes]:
        """Little-endian float32 bytes, at most a second at a time."""
        if isinstance(piece, np.ndarray):
            samples = _floats(piece)
        elif isinstance(piece, (bytes, bytearray, memoryview)):
            data = self._half + bytes(piece)
            whole = len(data) & ~1
            self._half = data[whole:]
            samples = _floats(np.frombuffer(data[:whole], dtype="<i2"))
        else:
            raise InvalidRequest(f"audio: expected 16-bit bytes or samples, got {type(piece).__name__}", param="audio")
        if self._resampler is not None:
            samples = self._resampler.push(samples)
        for start in range(0, len(samples), PIECE):
            yield samples[start : start + PIECE].tobytes()

    def finish(self) -> bytes:
        """What the resampler still held."""
        return b"" if self._resampler is None else self._resampler.finish().tobytes()


def _resampler(sample_rate: int) -> StreamResampler:
    if not _RATES[0] <= sample_rate <= _RATES[1]:
        raise InvalidRequest(
            f"sample_rate: expected {_RATES[0]} to {_RATES[1]} Hz, got {sample_rate}", param="sample_rate"
        )
    from .media import StreamResampler

    return StreamResampler(sample_rate, RATE)


def _floats(samples: NDArray[np.generic]) -> NDArray[np.float32]:
    """Samples [T] as float32. Raises InvalidRequest for other shapes and types, and where they are not finite."""
    if samples.ndim != 1:
        raise InvalidRequest(
            f"audio: expected samples [T] of one channel, got the shape {samples.shape}", param="audio"
        )
    if samples.dtype == np.int16:
        return samples.astype(np.float32) / np.float32(32768)
    if samples.dtype.kind != "f":
        raise InvalidRequest(f"audio: expected float32 or int16 samples, got {samples.dtype}", param="audio")
    floats = np.ascontiguousarray(samples, dtype="<f4")
    if not np.isfinite(floats).all():
        raise InvalidRequest("audio: expected finite samples, got NaN or infinity", param="audio")
    return floats

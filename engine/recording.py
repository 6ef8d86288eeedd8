"""PCM as it came, handed out as float32: whole files without a copy, live streams with their past forgotten.

All positions are samples of 16 kHz from the start of the recording.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import InvalidRequest

SAMPLE_RATE = 16_000
# Pieces of this many bytes lie in memory of their own, which goes back to the system when they are forgotten. The allocator
# would keep it: others' smaller things lie above.
_OWN_MEMORY = range(1 << 16, 1 << 23)
_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "s16": np.dtype("<i2")}


class Recording:
    """Samples `first`..`num_samples`. Pieces stay in the encoding they came in (s16 is half of f32)."""

    def __init__(self, encoding: Literal["f32", "s16"]) -> None:
        self._dtype = _DTYPES[encoding]
        self._pieces: deque[NDArray[Any]] = deque()
        self._first = 0  # sample number of the first piece's first sample
        self.num_samples = 0

    def append(self, pcm: bytes) -> None:
        """Raises InvalidRequest for half samples and for samples that are no numbers."""
        if len(pcm) % self._dtype.itemsize:
            raise InvalidRequest(
                f"pcm: expected a multiple of {self._dtype.itemsize} bytes, got {len(pcm)}", param="pcm"
            )
        if not pcm:
            return
        piece = np.frombuffer(_moved(pcm) if len(pcm) in _OWN_MEMORY else pcm, dtype=self._dtype)
        if self._dtype.kind == "f" and not np.isfinite(piece).all():
            raise InvalidRequest("pcm: every sample must be a finite number", param="pcm", code="invalid_audio")
        self._pieces.append(piece)
        self.num_samples += len(piece)

    def slice(self, start: int, end: int) -> torch.Tensor:
        """Samples [start, end) as fp32 [n], cut to what is there."""
        parts: list[NDArray[Any]] = []
        at = self._first
        for piece in self._pieces:
            if at >= end:
                break
            if at + len(piece) > start:
                parts.append(piece[max(0, start - at) : end - at])
            at += len(piece)
        if not parts:
            return torch.zeros(0)
        joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if self._dtype.kind == "f":
            return torch.from_numpy(joined.astype(np.float32))
        return torch.from_numpy(joined.astype(np.float32) / 32768.0)

    def forget(self, before: int) -> None:
        """Pieces that lie wholly before this sample are not needed any more."""
        while self._pieces and self._first + len(self._pieces[0]) <= before:
            self._first += len(self._pieces.popleft())

    @property
    def num_bytes(self) -> int:
        """Held in memory."""
        return sum(piece.nbytes for piece in self._pieces)


def _moved(pcm: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(pcm))
    memory.write(pcm)
    return memory

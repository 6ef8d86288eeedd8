"""Audio as it came: any pieces give the same samples, and what is forgotten is given back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from motet.engine.errors import InvalidRequest
from motet.engine.recording import Recording


@pytest.mark.parametrize("encoding", ["f32", "s16"])
@pytest.mark.parametrize("size", [4, 700, 1 << 16, 1 << 20, 1 << 23])  # small, in memory of their own, and large
def test_pieces_are_one_recording(encoding: Literal["f32", "s16"], size: int) -> None:
    numbers = np.random.default_rng(size).integers(-32768, 32768, 3 * max(size, 50) + 8)
    pcm = numbers.astype("<i2").tobytes() if encoding == "s16" else (numbers / 32768).astype("<f4").tobytes()
    recording = Recording(encoding)
    for start in range(0, len(pcm), size):
        recording.append(pcm[start : start + size])
    assert recording.num_samples == len(numbers) and recording.num_bytes == len(pcm)
    expected = torch.from_numpy((numbers / 32768).astype(np.float32))
    for start, end in [(0, len(numbers)), (len(numbers) // 3 + 1, len(numbers) // 2), (len(numbers) - 5, 1 << 40)]:
        assert torch.equal(recording.slice(start, end), expected[start:end])
    assert len(recording.slice(len(numbers), len(numbers) + 1)) == 0
    recording.forget(len(numbers) // 2)
    assert torch.equal(recording.slice(len(numbers) // 2, len(numbers)), expected[len(numbers) // 2 :])
    recording.forget(len(numbers))
    assert recording.num_bytes == 0 and recording.num_samples == len(numbers)


def test_bad_samples_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        Recording("s16").append(b"123")
    for bad in (np.nan, np.inf):
        with pytest.raises(InvalidRequest):
            Recording("f32").append(np.full(1 << 15, bad, "<f4").tobytes())


def test_what_is_forgotten_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    recording = Recording("s16")
    before = resident()
    pinned = []
    for _ in range(256):  # 64 MB, with small things between
        recording.append(bytes(1 << 18))
        pinned.append(bytes(1000))
    held = resident() - before
    assert held > 60 << 20
    recording.forget(recording.num_samples - 1)
    assert resident() - before < held - (50 << 20) and len(pinned) == 256

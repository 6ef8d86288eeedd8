"""What is cut off an utterance's ends, however it is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine.silence import SilenceTrimmer

RATE = 24_000
WINDOW = RATE // 100


def noise(num_windows: float, level: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-level, level, round(num_windows * WINDOW)).astype(np.float32)


def trimmed(pcm: np.ndarray, cuts: list[int]) -> np.ndarray:
    trimmer = SilenceTrimmer(0.01, sample_rate=RATE)
    pieces = np.split(pcm, sorted(cut % (len(pcm) + 1) for cut in cuts))
    out = [trimmer.push(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    return np.concatenate(out)


def test_noise_before_and_after_speech_is_cut() -> None:
    front, speech, end = noise(45, 0.005), noise(80.5, 0.3, 1), noise(60, 0.005, 2)
    out = trimmed(np.concatenate((front, speech, end)), [])
    assert np.array_equal(out[: 3 * WINDOW], front[-3 * WINDOW :])
    assert np.array_equal(out[3 * WINDOW :][: len(speech)], speech)
    # 30 windows are held back, 5 of them stay; what came before them had gone out.
    assert len(out) <= len(speech) + (3 + 30 + 5 + 1) * WINDOW


def test_pauses_within_speech_stay() -> None:
    whole = np.concatenate((noise(20, 0.3), noise(50, 0.001, 1), noise(20, 0.3, 2)))
    assert np.array_equal(trimmed(whole, []), whole)


@pytest.mark.parametrize("num_windows", [0, 0.5, 4, 300])
def test_an_utterance_of_nothing_but_noise_ends(num_windows: float) -> None:
    out = trimmed(noise(num_windows, 0.005), [])
    assert len(out) <= max(5.5, num_windows - 95) * WINDOW


@given(cuts=st.lists(st.integers(0, 50_000), max_size=8), front=st.integers(0, 130), middle=st.integers(0, 60))
def test_in_pieces_is_as_whole(cuts: list[int], front: int, middle: int) -> None:
    parts = (noise(front, 0.005), noise(20.3, 0.3, 1), noise(middle, 0.004, 2), noise(9, 0.3, 3), noise(7.7, 0.002, 4))
    pcm = np.concatenate(parts)
    assert np.array_equal(trimmed(pcm, cuts), trimmed(pcm, []))

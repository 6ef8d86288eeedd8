"""Times of words: the alignment against its plain form, and the repairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from motet.engine.word_times import (
    TimedWord,
    alignment_matrix,
    fit_to_segment,
    make_monotone,
    median7,
    merge_punctuation,
    monotone_path,
    shorten_at_sentence_ends,
    time_words,
    typical_duration,
)


def plain_warping(x: NDArray[np.float64]) -> list[int]:
    """Dynamic time warping cell by cell, as in the textbook; begins of rows."""
    rows, columns = x.shape
    cost = np.full((rows + 1, columns + 1), np.inf)
    cost[0, 0] = 0
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            cost[i, j] = x[i - 1, j - 1] + min(cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1])
    begins = [0] * rows
    i, j = rows, columns
    while i > 0 and j > 0:
        begins[i - 1] = j - 1
        step = min((cost[i - 1, j - 1], 0), (cost[i - 1, j], 1), (cost[i, j - 1], 2))[1]
        i, j = (i - 1, j - 1) if step == 0 else (i - 1, j) if step == 1 else (i, j - 1)
    return begins


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (6, 4), (5, 40), (20, 21)])
def test_path_equals_plain_warping(shape: tuple[int, int]) -> None:
    gain = np.random.default_rng(0).normal(size=shape)
    begins = monotone_path(gain)
    assert begins.tolist() == plain_warping(-gain)
    assert (np.diff(begins) >= 0).all()


def test_median_equals_sorting() -> None:
    x = torch.randn(2, 3, 50)
    padded = torch.nn.functional.pad(x, (3, 3), mode="reflect")
    assert torch.equal(median7(x), padded.unfold(-1, 7, 1).sort(-1).values[..., 3])
    assert median7(x[..., :3]) is not None and median7(x[..., :3]).shape == (2, 3, 3)


def test_a_diagonal_is_followed() -> None:
    """Attention that moves on by ten frames a token gives these begins, whatever the scale of the heads."""
    frames = torch.arange(100).float()
    centres = torch.arange(10).float()[:, None] * 10 + 5
    weights = torch.softmax(-((frames - centres) ** 2) / 8, dim=-1)
    begins = monotone_path(alignment_matrix(torch.stack([weights, weights * 0.1])))
    assert begins[0] == 0
    assert all(abs(int(begin) - 10 * at) <= 2 for at, begin in enumerate(begins))


def word(text: str, start: float, end: float) -> TimedWord:
    return TimedWord(text=text, start=start, end=end, probability=1.0, first=0, num_tokens=1)


def test_words_and_punctuation() -> None:
    timed = time_words(
        [" He", "llo", ",", ' "', "you", "!"], [1, 1, 1, 1, 1, 1], [0, 10, 20, 22, 25, 40, 44], [0.5] * 6
    )
    assert [(w.start, w.end) for w in timed[:2]] == [(0.0, 0.2), (0.2, 0.4)]
    merged = merge_punctuation(timed)
    assert [w.text for w in merged] == [" He", "llo,", ' "you!']
    assert [(w.first, w.num_tokens) for w in merged] == [(0, 1), (1, 2), (3, 3)]


def test_a_swallowed_pause_is_given_back() -> None:
    words = [word(" one", 0.0, 0.3), word(".", 0.3, 2.0), word(" two", 2.0, 2.3), word(" three", 2.3, 2.6)]
    typical = typical_duration(words)
    assert typical == pytest.approx(0.3)
    shorten_at_sentence_ends(words, typical)
    assert words[1].end == pytest.approx(0.9)
    # The first word of a segment reaches back into the pause before it, the last one beyond its end.
    late = [word(" two", 2.0, 6.0), word(" three", 6.0, 6.3), word(" four", 6.3, 9.0)]
    start, end = fit_to_segment(late, 5.6, 6.4, typical_s=0.3, last_end=1.0)
    assert start == late[0].start == pytest.approx(5.4)
    assert end == pytest.approx(6.4) and late[2].end == pytest.approx(6.6)


def test_times_never_run_backwards() -> None:
    words = [word("a", 1.0, 0.5), word("b", 0.2, 3.0), word("c", 2.0, 9.0)]
    make_monotone(words, 0.4, 4.0)
    times = [t for w in words for t in (w.start, w.end)]
    assert times == sorted(times) and times[0] >= 0.4 and times[-1] <= 4.0
    make_monotone([], 0.0, 1.0)

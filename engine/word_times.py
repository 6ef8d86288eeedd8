"""When each word was said: attention of the alignment heads, a monotone path through it, and repairs of what it gets wrong.

Times are seconds from the start of the window. It knows no model: it takes attention weights and words already split.
A word starts in the frame (20 ms) in which the path first reaches the row that predicted its first token.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

FRAME_S = 0.02
_PREPEND = "\"'“¿([{-"
_APPEND = "\"'.。,，!！?？:：”)]}、"
_SENTENCE_END = ".。!！?？"
_LONGEST_MEDIAN_S = 0.7
# Exchanges that bring the median of seven to place 3.
_MEDIAN7 = ((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4))


@dataclass(kw_only=True)
class TimedWord:
    """One word while its times are being worked out. `first` is the index of its first token among the text tokens."""

    text: str
    start: float
    end: float
    probability: float
    first: int
    num_tokens: int


# ---------------------------------------------------------------------------------------------------------- alignment


def alignment_matrix(weights: torch.Tensor) -> NDArray[np.float64]:
    """[tokens, frames] from attention weights [heads, tokens, frames] (softmaxed over real frames only).

    Each frame is normalised over the tokens, smoothed over seven frames, averaged over the heads.
    """
    weights = weights.float()
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    normal = (weights - mean) / std.clamp_min(1e-12)
    result: NDArray[np.float64] = median7(normal).mean(0).double().numpy(force=True)
    return result


def median7(x: torch.Tensor) -> torch.Tensor:
    """Median over seven neighbours along the last dimension, mirrored at the ends; too short rows stay as they are."""
    count = x.shape[-1]
    if count <= 3:
        return x
    padded = torch.cat([x[..., 1:4].flip(-1), x, x[..., -4:-1].flip(-1)], dim=-1)
    taps = [padded[..., shift : shift + count] for shift in range(7)]
    for low, high in _MEDIAN7:
        taps[low], taps[high] = torch.minimum(taps[low], taps[high]), torch.maximum(taps[low], taps[high])
    return taps[3]


def monotone_path(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """The frame at which each row begins on the best monotone path through gain [rows, frames]: [rows] int64.

    Dynamic time warping with steps right, down and diagonal. A row's recurrence c[j] = x[j] + min(a[j], c[j-1]) is
    unrolled with sums: with s the running sum of x, c - s is a running minimum; so each row is four vector operations.
    """
    num_rows, num_frames = gain.shape
    cost = np.full((num_rows + 1, num_frames + 1), np.inf)
    cost[0, 0] = 0.0
    for row in range(num_rows):
        x = -gain[row]
        total = np.cumsum(x)
        above = np.minimum(cost[row, :-1], cost[row, 1:])
        cost[row + 1, 1:] = total + np.minimum.accumulate(above - (total - x))
    begins = np.zeros(num_rows, dtype=np.int64)
    row, frame = num_rows, num_frames
    while row > 0:
        begins[row - 1] = frame - 1
        diagonal, above_, left = cost[row - 1, frame - 1], cost[row - 1, frame], cost[row, frame - 1]
        if diagonal < above_ and diagonal < left:
            row, frame = row - 1, frame - 1
        elif above_ < diagonal and above_ < left:
            row -= 1
        elif frame > 1:
            frame -= 1
        else:
            row -= 1
    return begins


# --------------------------------------------------------------------------------------------------------------- words


def time_words(
    words: Sequence[str], sizes: Sequence[int], begins: Sequence[int], probabilities: Sequence[float]
) -> list[TimedWord]:
    """Words with raw times. `sizes` counts each word's tokens; `begins` has a frame for each token and one for the end."""
    timed, first = [], 0
    for text, size in zip(words, sizes, strict=True):
        last = first + size
        share = probabilities[first:last]
        timed.append(
            TimedWord(
                text=text,
                start=begins[first] * FRAME_S,
                end=begins[min(last, len(begins) - 1)] * FRAME_S,
                probability=sum(share) / len(share) if share else 0.0,
                first=first,
                num_tokens=size,
            )
        )
        first = last
    return timed


def typical_duration(words: Sequence[TimedWord]) -> float:
    """Median of the words' durations, at most 0.7 s; 0 without any."""
    spans = [word.end - word.start for word in words if word.end > word.start]
    return min(_LONGEST_MEDIAN_S, statistics.median(spans)) if spans else 0.0


def shorten_at_sentence_ends(words: Sequence[TimedWord], typical_s: float) -> None:
    """A word beside the end of a sentence has swallowed the pause when it lasts more than twice the typical: cut it."""
    longest = 2 * typical_s
    if longest <= 0:
        return
    for before, word in zip(words, words[1:], strict=False):
        if word.end - word.start > longest:
            if word.text.strip() in _SENTENCE_END:
                word.end = word.start + longest
            elif before.text.strip() in _SENTENCE_END:
                word.start = word.end - longest


def merge_punctuation(words: Sequence[TimedWord]) -> list[TimedWord]:
    """Opening marks join the word after them, closing marks the word before; the joined mark's times are dropped."""
    merged: list[TimedWord] = []
    for word in words:
        before = merged[-1] if merged else None
        if before is not None and word.text in _APPEND and word.text and not before.text.endswith(" "):
            before.text += word.text
            before.num_tokens += word.num_tokens
        elif before is not None and before.text.startswith(" ") and _is_opening(before.text):
            word.text = before.text + word.text
            word.first, word.num_tokens = before.first, before.num_tokens + word.num_tokens
            merged[-1] = word
        else:
            merged.append(word)
    return merged


def _is_opening(text: str) -> bool:
    mark = text.strip()
    return bool(mark) and mark in _PREPEND


def fit_to_segment(
    words: list[TimedWord], start: float, end: float, *, typical_s: float, last_end: float
) -> tuple[float, float]:
    """Repair the first and last word of a segment that the decoder put at [start, end]; gives the segment's new bounds.

    `last_end` is where speech ended before it. Attention at the edges of speech often reaches into the pause.
    """
    if not words:
        return start, end
    longest = 2 * typical_s
    first = words[0]
    after_pause = first.end - last_end > 4 * typical_s
    pair_long = len(words) > 1 and words[1].end - first.start > 2 * longest
    if after_pause and typical_s > 0 and (first.end - first.start > longest or pair_long):
        if len(words) > 1 and words[1].end - words[1].start > longest:
            first.end = words[1].start = max(words[1].end / 2, words[1].end - longest)
        first.start = max(0.0, first.end - longest)
    if start < first.end and start - 0.5 > first.start:
        first.start = max(0.0, min(first.end - typical_s, start))
    else:
        start = first.start
    final = words[-1]
    if end > final.start and end + 0.5 < final.end:
        final.end = max(final.start + typical_s, end)
    else:
        end = final.end
    return start, end


def make_monotone(words: Sequence[TimedWord], start: float, end: float) -> None:
    """Times in [start, end] that never run backwards, in place."""
    floor = start
    for word in words:
        word.start = min(max(word.start, floor), end)
        word.end = min(max(word.end, word.start), end)
        floor = word.end

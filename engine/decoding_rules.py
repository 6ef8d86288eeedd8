"""What a Whisper decoder may say next, and what to make of what it said. Rules over logits and lists of ids.

It knows neither models nor requests. A *timestamp* is a token from `timestamp_begin` on, in steps of 20 ms; *text* is an id
below `eot`. `sampled` are the ids after the prompt and the start-of-transcript sequence.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

TIMESTAMP_S = 0.02
# A loop is called one when its repeats cover this many text tokens: no sentence does, and the sampler would go on to the end.
_LOOP_TOKENS = 48
_LOOP_PERIOD = 16
_LOOP_REPEATS = 4


class DecodingRules:
    """Bans for rows of logits [N, V] fp32, in place: suppressed ids, blanks at the start, the grammar of timestamps."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eot: int,
        no_timestamps: int,
        timestamp_begin: int,
        suppress: Sequence[int] = (),
        begin_suppress: Sequence[int] = (),
        max_initial_timestamp_s: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.eot = eot
        self.timestamp_begin = timestamp_begin
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._max_initial = round(max_initial_timestamp_s / TIMESTAMP_S)
        self._always = self._ids([no_timestamps])
        self._suppress = self._ids([*suppress, no_timestamps])
        self._begin_suppress = self._ids(begin_suppress)
        self._own_lists: dict[tuple[int, ...], torch.Tensor] = {}

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        known = sorted({i for i in ids if 0 <= i < self._vocab_size})
        return torch.tensor(known, dtype=torch.int64, device=self._device)

    def apply(
        self,
        logits: torch.Tensor,
        sampled: Sequence[Sequence[int]],
        *,
        timestamps: Sequence[bool],
        suppress: Sequence[tuple[int, ...] | None] = (),
    ) -> None:
        """Bans ids in `logits` [N, V]. `suppress[n]`, where given, takes the place of the model's own list in row n."""
        begin = self.timestamp_begin
        own = [row for row, ids in enumerate(suppress) if ids is not None]
        if own:
            for row in range(len(sampled)):
                listed = suppress[row]
                logits[row, self._suppress if listed is None else self._list(listed)] = -torch.inf
        else:
            logits.index_fill_(1, self._suppress, -torch.inf)
        for row, ids in enumerate(sampled):
            if not ids:
                logits[row, self._begin_suppress] = -torch.inf
            if not timestamps[row]:
                logits[row, begin:] = -torch.inf
                continue
            self._ban_by_grammar(logits[row], ids)
        # Where all timestamps together are likelier than any text, a timestamp it is.
        timed = list(timestamps)
        if not any(timed):
            return
        wins = logits[:, begin:].logsumexp(-1) > logits[:, :begin].amax(-1)
        if not all(timed):
            wins &= torch.tensor(timed, device=logits.device)
        for row in wins.nonzero()[:, 0].tolist():
            logits[row, :begin] = -torch.inf

    def _ban_by_grammar(self, row: torch.Tensor, ids: Sequence[int]) -> None:
        begin = self.timestamp_begin
        if not ids:
            row[:begin] = -torch.inf
            row[begin + self._max_initial + 1 :] = -torch.inf
            return
        closes = ids[-1] >= begin  # the last one is a timestamp, and ...
        opened = closes and (len(ids) < 2 or ids[-2] >= begin)  # ... it opens a segment
        if opened:
            row[begin:] = -torch.inf
        elif closes:
            row[: self.eot] = -torch.inf
        last = next((i for i in reversed(ids) if i >= begin), None)
        if last is not None:
            # A closing timestamp may be said again as the next opening; else time must move on.
            row[begin : last if closes and not opened else last + 1] = -torch.inf

    def _list(self, ids: tuple[int, ...]) -> torch.Tensor:
        found = self._own_lists.get(ids)
        if found is None:
            if len(self._own_lists) >= 64:
                self._own_lists.clear()
            found = self._own_lists[ids] = torch.cat([self._ids(ids), self._always])
        return found


# ------------------------------------------------------------------------------------------------------------- scores


def compression_ratio(text: str) -> float:
    """Bytes of the text over bytes of its zlib form: above 2.4 it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def needs_fallback(
    *,
    ratio: float,
    avg_logprob: float,
    no_speech_prob: float,
    looped: bool = False,
    ratio_threshold: float = 2.4,
    logprob_threshold: float = -1.0,
    no_speech_threshold: float = 0.6,
) -> bool:
    """Whether a decoding is to be tried again at a higher temperature. NaN counts as failure."""
    unsure = not avg_logprob >= logprob_threshold
    if no_speech_prob > no_speech_threshold and unsure and not looped:
        return False  # silence: another try would only invent something
    return looped or unsure or ratio > ratio_threshold or math.isnan(no_speech_prob)


def is_silence(
    *, avg_logprob: float, no_speech_prob: float, logprob_threshold: float = -1.0, no_speech_threshold: float = 0.6
) -> bool:
    """Whether a window's text is dropped: probably no speech, and not sure of the words either. NaN: dropped."""
    return not no_speech_prob <= no_speech_threshold and not avg_logprob > logprob_threshold


def loop_period(text_ids: Sequence[int]) -> int:
    """Length of the phrase that the ids end with over and over, or 0. Timestamps must have been taken out."""
    count = len(text_ids)
    for period in range(1, min(_LOOP_PERIOD, count // 2) + 1):
        span = max(_LOOP_TOKENS, _LOOP_REPEATS * period)
        if count >= span and list(text_ids[count - span + period :]) == list(text_ids[count - span : count - period]):
            return period
    return 0


def cut_loop(ids: Sequence[int], eot: int) -> list[int]:
    """The ids with a loop at their end cut down to its first phrase; others as they are."""
    where = [index for index, i in enumerate(ids) if i < eot]
    text = [ids[index] for index in where]
    period = loop_period(text)
    if not period:
        return list(ids)
    first = len(text) - period
    while first > 0 and text[first - 1] == text[first - 1 + period]:
        first -= 1
    return list(ids[: where[min(first + period, len(text)) - 1] + 1])


# ----------------------------------------------------------------------------------------------------------- segments


@dataclass(frozen=True, kw_only=True)
class TimedIds:
    """A piece between two timestamps: seconds from the window's start. `ids` hold the timestamps too.

    `first` is the index of ids[0] among the window's ids.
    """

    start: float
    end: float
    ids: list[int]
    first: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """A window's segments, and how far it was heard: `heard_s` is where to go on; `last_s` the last timestamp, if any.

    `closed` is True when the decoder ended with one timestamp: it says that nothing follows in this window. `tail` is what
    was said after the last pair without a timestamp at its end: to be heard again from `heard_s`, or taken as it is.
    """

    segments: list[TimedIds]
    tail: TimedIds | None
    heard_s: float
    last_s: float | None
    closed: bool


def split_segments(ids: Sequence[int], *, timestamp_begin: int, window_s: float) -> Split:
    """Cut a window's ids (without eot) at pairs of timestamps. `window_s` is the true length of its audio."""
    timed = [i >= timestamp_begin for i in ids]
    closed = timed[-2:] == [False, True]
    cuts = [index for index in range(1, len(ids)) if timed[index] and timed[index - 1]]

    def time_of(index: int) -> float:
        return (ids[index] - timestamp_begin) * TIMESTAMP_S

    stamps = [index for index, is_time in enumerate(timed) if is_time]
    last = time_of(stamps[-1]) if stamps else None
    if not cuts:
        start = time_of(0) if timed[:1] == [True] else 0.0
        end = last if last is not None and last > start else window_s
        whole = [TimedIds(start=start, end=max(start, end), ids=list(ids), first=0)] if ids else []
        return Split(segments=whole, tail=None, heard_s=window_s, last_s=last, closed=closed)
    if closed:
        cuts.append(len(ids))
    segments, begin = [], 0
    for cut in cuts:
        piece = list(ids[begin:cut])
        if piece:
            segments.append(TimedIds(start=time_of(begin), end=time_of(cut - 1), ids=piece, first=begin))
        begin = cut
    heard = window_s if closed else time_of(cuts[-1] - 1)
    tail = None
    if any(not is_time for is_time in timed[begin:]):
        start = time_of(begin)
        tail = TimedIds(start=start, end=max(start, window_s), ids=list(ids[begin:]), first=begin)
    return Split(segments=segments, tail=tail, heard_s=heard, last_s=last, closed=closed)

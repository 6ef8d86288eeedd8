"""From decoded windows to the segments of a recording: exact times, words, what to hear again, joints at forced cuts.

A *span* is a stretch of the recording that is decoded on its own; it takes one window of at most 30 s, or several one after
another where the decoder stopped early or the span is longer. Segments leave in order, once nothing before them is open.
Positions are samples of the recording, times seconds from its start. It knows no engine and no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .decode_job import Decoded
from .decoding_rules import TimedIds, is_silence, split_segments
from .recording import SAMPLE_RATE
from .types import Segment, Word
from .word_times import (
    TimedWord,
    fit_to_segment,
    make_monotone,
    merge_punctuation,
    shorten_at_sentence_ends,
    time_words,
    typical_duration,
)

WINDOW_SAMPLES = 480_000
_SPEECH_LEFT = 9_600  # speech after the last timestamp that is worth another look: 0.6 s
_PROGRESS = 16_000  # a window that got less far than this is not repeated from there: 1 s
_SHORTEST = 1_600  # nothing is said in less than 0.1 s
_BEFORE_S, _AFTER_S = 0.06, 0.1  # how much earlier and later than the detector says a word may begin and end
_REACH_S = 0.3  # a word this near the edge of speech ends there
_NEAR_S = 0.5  # around the doubly heard stretch, where its words may have been put


@dataclass(kw_only=True)
class PlacedSegment:
    """A segment with its words and the ids of each word; `words` is None where nobody needs them."""

    segment: Segment
    words: list[Word] | None = None
    word_ids: list[list[int]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Span:
    """Samples start..end. `speech` are the stretches in it that the detector calls speech, without padding, sorted."""

    start: int
    end: int
    speech: tuple[tuple[int, int], ...] = ()
    forced_cut: bool = False  # ends within speech; the next span begins with the same audio
    overlap: int = 0  # samples at its start that the span before has too
    growing: bool = False  # a look at the open segment of a stream: taken as it is
    cautious: bool = False  # the detector heard no speech: only a sure transcript counts
    seek: int = -1  # where the next window begins
    again: bool = False  # the decoder thought that it had heard all; a second look must not invent anything
    placed: list[PlacedSegment] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.seek = self.start

    @property
    def window_end(self) -> int:
        return min(self.end, self.seek + WINDOW_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class WindowReader:
    """Reads decoded windows of one request. `tokens` and `tokenizer` are the model's."""

    tokens: Any
    tokenizer: Any
    timestamps: bool
    words: bool
    logprob_threshold: float
    no_speech_threshold: float

    def read(self, span: Span, decoded: Decoded, language: str) -> None:
        """Append the window's segments to its span and move `seek`, or mark the span done."""
        start, end = span.seek, span.window_end
        window_s = (end - start) / SAMPLE_RATE
        if self._is_empty(span, decoded):
            self._advance(span, end, heard=end, closed=True)
            return
        if self.timestamps:
            split = split_segments(decoded.ids, timestamp_begin=self.tokens.timestamp_begin, window_s=window_s)
            pieces = split.segments
            last = split.last_s if split.closed and split.last_s is not None else split.heard_s
            heard, closed = start + round(last * SAMPLE_RATE), split.closed or split.heard_s >= window_s
            if split.tail is not None and (span.growing or heard - start < _PROGRESS):
                pieces, heard, closed = [*pieces, split.tail], end, True
        else:
            pieces = [TimedIds(start=0.0, end=window_s, ids=decoded.ids, first=0)]
            heard, closed = end, True
        placed = self._place(span, decoded, pieces, start, window_s, language)
        span.placed.extend(placed)
        self._advance(span, end, heard=heard if placed else end, closed=closed)

    def _is_empty(self, span: Span, decoded: Decoded) -> bool:
        if not decoded.text:
            return True
        if span.cautious and not (decoded.no_speech_prob < 0.3 and decoded.avg_logprob > -0.7):
            return True
        if span.again and not decoded.no_speech_prob <= self.no_speech_threshold:
            return True
        return is_silence(
            avg_logprob=decoded.avg_logprob,
            no_speech_prob=decoded.no_speech_prob,
            logprob_threshold=self.logprob_threshold,
            no_speech_threshold=self.no_speech_threshold,
        )

    def _advance(self, span: Span, end: int, *, heard: int, closed: bool) -> None:
        """Where the next window begins: at the last timestamp if words may follow it, else after this window."""
        heard = min(heard, end)
        far = heard - span.seek >= _PROGRESS
        if end < span.end:  # more to come anyway; a closed window says that it held nothing more
            target = heard if far and not closed else end
        elif closed:
            left = span.speech[-1][1] - heard if span.speech else 0
            span.again = far and left >= _SPEECH_LEFT
            target = heard if span.again else end
        else:
            target = heard if far else end
        span.seek = target
        span.done = span.end - target < _SHORTEST

    def _place(
        self,
        span: Span,
        decoded: Decoded,
        pieces: Sequence[TimedIds],
        start: int,
        window_s: float,
        language: str,
    ) -> list[PlacedSegment]:
        offset = start / SAMPLE_RATE
        speech = [((a - start) / SAMPLE_RATE, (b - start) / SAMPLE_RATE) for a, b in span.speech]
        eot = self.tokens.eot
        words = self._words(decoded, pieces, language) if self.words and decoded.begins is not None else None
        placed: list[PlacedSegment] = []
        last_end = 0.0
        typical = typical_duration([word for group in words for word, _ in group]) if words is not None else 0.0
        for at, piece in enumerate(pieces):
            text_ids = [i for i in piece.ids if i < eot]
            text = self.tokenizer.decode(text_ids)
            begin, end = piece.start, min(piece.end, window_s)
            # What begins after the audio has ended was never said.
            if not text.strip() or begin >= window_s:
                continue
            its_words: list[Word] | None = None
            word_ids: list[list[int]] = []
            if words is not None:
                timed = [word for word, _ in words[at]]
                begin, end = fit_to_segment(timed, begin, end, typical_s=typical, last_end=last_end)
                for word in timed:
                    word.start, word.end = within_speech(word.start, word.end, speech)
                reach_speech(timed, speech)
                if timed:
                    begin, end = timed[0].start, timed[-1].end
                begin, end = max(0.0, min(begin, window_s)), min(end, window_s)
                make_monotone(timed, max(begin, last_end), max(end, last_end))
                its_words = [
                    Word(
                        word=word.text,
                        start=round(offset + word.start, 3),
                        end=round(offset + word.end, 3),
                        probability=round(word.probability, 4),
                    )
                    for word in timed
                ]
                word_ids = [ids for _, ids in words[at]]
            else:
                begin, end = within_speech(begin, end, speech)
            begin = max(begin, last_end)
            end = max(end, begin)
            last_end = end
            placed.append(
                PlacedSegment(
                    segment=Segment(
                        id=0,
                        start=round(offset + begin, 3),
                        end=round(offset + end, 3),
                        text=text,
                        tokens=list(piece.ids),
                        temperature=decoded.temperature,
                        avg_logprob=decoded.avg_logprob,
                        compression_ratio=decoded.compression_ratio,
                        no_speech_prob=decoded.no_speech_prob,
                        seek=start // 160,
                        language=language,
                    ),
                    words=its_words,
                    word_ids=word_ids,
                )
            )
        return placed

    def _words(
        self, decoded: Decoded, pieces: Sequence[TimedIds], language: str
    ) -> list[list[tuple[TimedWord, list[int]]]]:
        """Each piece's words with raw times and their ids."""
        assert decoded.begins is not None
        eot = self.tokens.eot
        order: dict[int, int] = {}  # index among the window's ids -> index among its text ids
        for at, i in enumerate(decoded.ids):
            if i < eot:
                order[at] = len(order)
        result: list[list[tuple[TimedWord, list[int]]]] = []
        for piece in pieces:
            places = [piece.first + at for at, i in enumerate(piece.ids) if i < eot]
            if not places:
                result.append([])
                continue
            ids = [decoded.ids[at] for at in places]
            texts, groups = self.tokenizer.split_to_words(ids, language)
            probabilities = [math.exp(min(0.0, decoded.logprobs[at])) for at in places]
            first = order[places[0]]
            begins = decoded.begins[first : first + len(ids) + 1]
            timed = time_words(texts, [len(group) for group in groups], begins, probabilities)
            shorten_at_sentence_ends(timed, typical_duration(timed))
            merged = merge_punctuation(timed)
            result.append([(word, ids[word.first : word.first + word.num_tokens]) for word in merged])
        return result


class Transcript:
    """The spans of one recording in order. `hold`: a forced cut waits for the span after it, for the best joint."""

    def __init__(self, *, keep_words: bool, hold: bool = True) -> None:
        self._spans: deque[Span] = deque()
        self._keep_words = keep_words
        self._hold = hold
        self._num_segments = 0
        self._last_end = 0.0
        self._tail: list[Word] = []  # the last words that have left, where the next span overlaps them

    def add(self, span: Span) -> None:
        self._spans.append(span)

    @property
    def num_open(self) -> int:
        """Spans that have not wholly left."""
        return len(self._spans)

    @property
    def open_from(self) -> int | None:
        """The first sample that is still needed; None when nothing is open."""
        return self._spans[0].start if self._spans else None

    def take(self) -> list[tuple[Span, list[PlacedSegment]]]:
        """What can leave now: finished segments in order, with their span."""
        leaving: list[tuple[Span, list[PlacedSegment]]] = []
        while self._spans:
            span = self._spans[0]
            if not span.done:
                if not span.forced_cut and not span.overlap and span.placed:  # a long span: what is there is final
                    leaving.append((span, self._stamp(span.placed)))
                    span.placed = []
                break
            after = self._spans[1] if len(self._spans) > 1 else None
            if span.forced_cut and self._hold:
                if after is None or not after.done:
                    break
                joint = (after.start / SAMPLE_RATE, span.end / SAMPLE_RATE)
                join(span.placed, after.placed, joint)
            elif not self._hold:
                self._trim_alone(span, after)
            self._spans.popleft()
            leaving.append((span, self._stamp(span.placed)))
        return leaving

    def _trim_alone(self, span: Span, after: Span | None) -> None:
        """Live: the joint is the middle of what both heard, set before the other side is known."""
        if span.overlap:
            begin = span.start / SAMPLE_RATE
            tail = [PlacedSegment(segment=Segment(id=0, start=0.0, end=0.0, text=""), words=self._tail)]
            join(tail, span.placed, (begin, begin + span.overlap / SAMPLE_RATE), keep_left=True)
        self._tail = []
        if span.forced_cut and after is not None:
            middle = (span.end - after.overlap / 2) / SAMPLE_RATE
            _keep_words(span.placed, lambda word: (word.start + word.end) / 2 < middle)
            self._tail = [word for placed in span.placed for word in placed.words or []][-8:]

    def _stamp(self, placed: Sequence[PlacedSegment]) -> list[PlacedSegment]:
        """Ids, and times that never run backwards."""
        for item in placed:
            segment = item.segment
            segment.id = self._num_segments
            self._num_segments += 1
            segment.start = max(segment.start, self._last_end)
            segment.end = max(segment.end, segment.start)
            for word in item.words or []:
                word.start = max(word.start, self._last_end)
                word.end = max(word.end, word.start)
            self._last_end = segment.end
            segment.words = item.words if self._keep_words else None
        return list(placed)


def within_speech(start: float, end: float, speech: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Times of something said, without the pauses at its edges; as they are where no speech touches them."""
    touching = [(a, b) for a, b in speech if b > start and a < end]
    if not touching:
        return start, end
    return max(start, min(touching[0][0] - _BEFORE_S, end)), min(end, max(touching[-1][1] + _AFTER_S, start))


def reach_speech(words: Sequence[TimedWord], speech: Sequence[tuple[float, float]]) -> None:
    """The first and last word of a stretch of speech reach its edges, where these are near; in place.

    A word's end is when the next token begins to be attended to, which at a pause is often before the sound has died.
    """
    for low, high in speech:
        mine = [word for word in words if low <= (word.start + word.end) / 2 < high]
        if mine and 0 < mine[0].start - low < _REACH_S:
            mine[0].start = low
        if mine and 0 < high - mine[-1].end < _REACH_S:
            mine[-1].end = high


# -------------------------------------------------------------------------------------------------------------- joints


def join(
    left: list[PlacedSegment], right: list[PlacedSegment], zone: tuple[float, float], *, keep_left: bool = False
) -> None:
    """Two transcripts that both heard the seconds `zone`: drop, in place, what would be said twice.

    The longest run of equal words near the zone is the joint; without any, the zone's middle. `keep_left`: the left side has
    left already, so that only the right one is cut.
    """
    low, high = zone[0] - _NEAR_S, zone[1] + _NEAR_S
    before = [word for placed in left for word in placed.words or []]
    after = [word for placed in right for word in placed.words or []]
    tail = [at for at, word in enumerate(before) if word.end > low]
    head = [at for at, word in enumerate(after) if word.start < high]
    run = _longest_run([_key(before[at]) for at in tail], [_key(after[at]) for at in head])
    if run is not None:
        end_left, end_right = tail[run[0] + run[2] - 1], head[run[1] + run[2] - 1]
        if not keep_left or end_left == len(before) - 1:
            if not keep_left:
                kept = {id(word) for word in before[: end_left + 1]}
                _keep_words(left, lambda word: id(word) in kept)
            dropped = {id(word) for word in after[: end_right + 1]}
            _keep_words(right, lambda word: id(word) not in dropped)
            return
    middle = (zone[0] + zone[1]) / 2
    if not keep_left:
        _keep_words(left, lambda word: (word.start + word.end) / 2 < middle)
    _keep_words(right, lambda word: (word.start + word.end) / 2 >= middle)


def _longest_run(a: Sequence[str], b: Sequence[str]) -> tuple[int, int, int] | None:
    """(start in a, start in b, length) of the longest common run of words; None without one. Both are short."""
    best: tuple[int, int, int] | None = None
    for i in range(len(a)):
        for j in range(len(b)):
            size = 0
            while i + size < len(a) and j + size < len(b) and a[i + size] == b[j + size]:
                size += 1
            if size and (best is None or size > best[2]):
                best = (i, j, size)
    return best


def _key(word: Word) -> str:
    return "".join(letter for letter in word.word.casefold() if letter.isalnum()) or word.word.strip()


def _keep_words(placed: list[PlacedSegment], keep: Any) -> None:
    """Drop words, in place; text, ids and times of their segments follow. Segments without words left are dropped."""
    for item in list(placed):
        words = item.words
        if words is None:
            continue
        kept = [at for at, word in enumerate(words) if keep(word)]
        if len(kept) == len(words):
            continue
        if not kept:
            placed.remove(item)
            continue
        item.words = [words[at] for at in kept]
        item.word_ids = [item.word_ids[at] for at in kept]
        segment = item.segment
        segment.text = "".join(word.word for word in item.words)
        segment.tokens = [i for ids in item.word_ids for i in ids]
        segment.start, segment.end = item.words[0].start, item.words[-1].end

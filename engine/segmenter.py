"""Where speech begins, ends and may be cut: probabilities per window in, spans of samples out. Pure; no audio, no tensors.

One tracker serves both ways of listening. `LiveSegmenter` is fed one probability at a time and says at once what it knows;
`speech_regions` feeds it a whole recording and, knowing what comes after, shares short gaps between neighbours. `chunks`
joins regions to pieces that a recogniser takes at once. All numbers are samples of the whole stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import InvalidRequest

SAMPLE_RATE = 16000


@dataclass(frozen=True, kw_only=True)
class SegmenterOptions:
    """Hysteresis and lengths, in samples of 16 kHz unless said. InvalidRequest names a value that cannot be."""

    threshold: float = 0.5  # speech begins at this probability
    negative_threshold: float | None = None  # below it silence may begin; None: threshold - 0.15, at least 0.01
    min_silence: int = 2560  # silence this long ends speech: 160 ms
    min_speech: int = 0  # shorter speech is passed over; 0: none is
    pad: int = 6400  # added at both ends: 400 ms
    tail: int | None = None  # live: added at the end instead, where less than `pad`
    max_speech: int = 464000  # the longest region, padding included: 29 s
    min_dip: int = 1536  # speech that is too long may be cut in silence this long: 96 ms
    overlap: int = 16000  # where there is none: what both sides of the cut hear, 1 s
    window: int = 512  # samples per probability

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise InvalidRequest(f"the threshold of speech is above 0 and at most 1, not {self.threshold}")
        if self.negative_threshold is not None and not 0.0 <= self.negative_threshold <= self.threshold:
            raise InvalidRequest(f"the negative threshold lies in 0..{self.threshold}, not {self.negative_threshold}")
        if (
            self.window < 1
            or min(self.min_silence, self.min_speech, self.pad, self.tail or 0, self.min_dip, self.overlap) < 0
        ):
            raise InvalidRequest("lengths of silence, speech and padding are not negative")
        if self.longest_run < 8:
            raise InvalidRequest(
                f"a segment of at most {self.max_speech} samples is too short for a padding of {self.pad} at both ends"
            )

    @property
    def silence_below(self) -> float:
        if self.negative_threshold is not None:
            return self.negative_threshold
        return min(max(self.threshold - 0.15, 0.01), self.threshold)

    @property
    def longest_run(self) -> int:
        """Windows of the longest stretch of speech without its padding."""
        return (self.max_speech - 2 * self.pad) // self.window

    @property
    def shared(self) -> int:
        """Windows that both sides of a forced cut hear; never more than a quarter of the longest stretch."""
        return min(-(-self.overlap // self.window), self.longest_run // 4)


@dataclass(frozen=True)
class Region:
    """Speech in samples start..end. The first `overlap` of them belong to the region before too: a forced cut lies there."""

    start: int
    end: int
    overlap: int = 0


@dataclass(frozen=True)
class Chunk:
    """A piece of audio to recognise: one span start..end of the recording, silence between its regions included.

    `forced_cut`: it ends within speech, and the next chunk begins `next.overlap` samples before this one's end.
    """

    start: int
    end: int
    regions: tuple[Region, ...]
    forced_cut: bool = False
    overlap: int = 0  # samples at its start that the chunk before has too


@dataclass(frozen=True)
class Boundary:
    """Live: speech started or stopped at `sample`.

    `cut`: only because it grew too long; a stop is followed by the start of the rest. That start has `overlap` > 0 when no
    silence was found, and lies that much before the stop.
    """

    what: Literal["started", "stopped"]
    sample: int
    cut: bool = False
    overlap: int = 0


@dataclass
class _Run:
    """A stretch of speech in windows start..end; `overlap` windows of it belong to the run before."""

    start: int
    end: int = -1
    overlap: int = 0
    rest: bool = False  # begins because the one before grew too long
    cut: bool = False  # ends because it grew too long
    gap: int = 0  # cut in silence: windows of it until the rest


class _Tracker:
    """The state machine, in windows. Remembers the probabilities of the run it is in, and no more."""

    def __init__(self, options: SegmenterOptions) -> None:
        self.options = options
        self.position = 0  # windows seen
        self.run: _Run | None = None
        self.silence: int | None = None  # window where silence within the run began
        self._probs: list[float] = []  # of windows run.start..position
        # Read once: they are asked for at every window.
        self._threshold, self._silence_below = options.threshold, options.silence_below
        self._longest = options.longest_run
        self._min_silence = max(-(-options.min_silence // options.window), 1)

    def push(self, prob: float) -> list[_Run]:
        """Take the next probability (one that is no number counts as 0) -> the runs that it made end, in order."""
        now = self.position
        self.position += 1
        run = self.run
        if run is None:
            if prob >= self._threshold:
                self.run, self.silence = _Run(now), None
                self._probs = [prob]
            return []
        silent = not prob >= self._silence_below
        self._probs.append(0.0 if prob != prob else prob)
        if prob >= self._threshold:
            self.silence = None
        elif silent and self.silence is None:
            self.silence = now
        if self.silence is not None:
            # In a run that is too long, silence ends even where something vague sounds in it: nothing may last forever.
            may_end = silent or now - run.start >= self._longest
            return self._end(self.silence) if may_end and self.position - self.silence >= self._min_silence else []
        ended = []
        while self.position - run.start > self._longest:
            ended.append(run)
            run = self._cut(run)
        return ended

    def finish(self) -> list[_Run]:
        """The input is over: the run that is open, if there is one."""
        return [] if self.run is None else self._end(self.position if self.silence is None else self.silence)

    def long_enough(self, run: _Run, end: int) -> bool:
        return run.rest or (end - run.start) * self.options.window >= self.options.min_speech

    def _end(self, end: int) -> list[_Run]:
        run = self.run
        assert run is not None
        run.end = end
        self.run = self.silence = None
        self._probs = []
        return [run] if self.long_enough(run, end) else []

    def _cut(self, run: _Run) -> _Run:
        """End the open run at the best place in the second half of what fits; the rest becomes the open run.

        The best is the longest silence of at least `min_dip`, of equal ones the last; without any, behind the window of
        the lowest probability, and then the rest begins `shared` windows earlier.
        """
        half, shared = self._longest // 2, 0
        dips = [dip for dip in self._dips(half) if (dip[1] - dip[0]) * self.options.window >= self.options.min_dip]
        if dips:
            stop, resume = max(dips, key=lambda dip: (dip[1] - dip[0], dip[0]))
        else:
            stop = 1 + min(range(half, self._longest), key=lambda i: (self._probs[i], -i))
            shared = self.options.shared
            resume = stop - shared
        run.end, run.cut, run.gap = run.start + stop, True, max(resume - stop, 0)
        self.run = _Run(run.start + resume, overlap=shared, rest=True)
        self._probs = self._probs[resume:]
        return self.run

    def _dips(self, first: int) -> Iterator[tuple[int, int]]:
        """Stretches of silence within the open run that begin at `first` or later and where a first part may end."""
        probs = self._probs
        at = first
        while at <= self._longest:
            end = at
            while end < len(probs) and probs[end] < self._silence_below:
                end += 1
            if end > at:
                yield at, end
            at = end + 1


def speech_regions(probs: Iterable[float], num_samples: int, options: SegmenterOptions) -> list[Region]:
    """The speech of a whole recording of `num_samples`: sorted, inside of it, each at most `max_speech` long.

    Every window at or above the threshold is in a region (with `min_speech` 0). Regions overlap at forced cuts only.
    """
    tracker = _Tracker(options)
    runs = [run for prob in probs for run in tracker.push(prob)] + tracker.finish()
    window = options.window
    spans = [[run.start * window, min(run.end * window, num_samples), run.overlap * window] for run in runs]
    for before, after in zip([None, *spans], [*spans, None]):
        gap = (after[0] if after else num_samples) - (before[1] if before else 0)
        if before:
            # A short gap is shared; what lies before the first and after the last region belongs to nobody else.
            before[1] += max(min(options.pad, gap // 2 if after else gap), 0)
        if after:
            after[0] -= max(min(options.pad, gap - gap // 2 if before else gap), 0)
    return [Region(start, end, overlap) for start, end, overlap in spans if start < end]


def chunks(regions: Sequence[Region], max_samples: int, max_gap: int = SAMPLE_RATE) -> list[Chunk]:
    """Join neighbours to spans of at most `max_samples`, over gaps shorter than `max_gap`; a forced cut stays one.

    The audio between joined regions is kept, so that one offset per chunk restores all times. Regions must fit.
    """
    assert all(region.end - region.start <= max_samples for region in regions), "regions are cut before they are joined"
    groups: list[list[Region]] = []
    for region in regions:
        last = groups[-1] if groups else None
        if (
            last
            and not region.overlap
            and region.start - last[-1].end < max_gap
            and region.end - last[0].start <= max_samples
        ):
            last.append(region)
        else:
            groups.append([region])
    return [
        Chunk(group[0].start, group[-1].end, tuple(group), bool(after and after[0].overlap), group[0].overlap)
        for group, after in zip(groups, [*groups[1:], None])
    ]


class LiveSegmenter:
    """Boundaries of speech in a stream, as soon as they are certain; memory for one segment's probabilities.

    A start lies `pad` before speech, but not before the last stop; a stop lies up to `pad` (or `tail`) after it, but not after
    what has been heard. Where twice the padding fits into `min_silence`, these are the regions that `speech_regions` gives.
    Where `tail` is shorter than `min_silence`, the stop is known before it is certain: `prospect`.
    """

    def __init__(self, options: SegmenterOptions) -> None:
        self.options = options
        self._tracker = _Tracker(options)
        self._tail = options.pad if options.tail is None else min(options.pad, options.tail)
        self._last_stop = 0
        self._start: int | None = None  # of the region that was told of and is open

    @property
    def position(self) -> int:
        """Samples heard."""
        return self._tracker.position * self.options.window

    @property
    def speaking(self) -> bool:
        """A start was told and no stop yet."""
        return self._start is not None

    @property
    def quiet_s(self) -> float:
        """Seconds since speech was last certain within the open region; 0 where there is none."""
        silence = self._tracker.silence
        return 0.0 if silence is None else (self._tracker.position - silence) * self.options.window / SAMPLE_RATE

    @property
    def prospect(self) -> int | None:
        """Where the open region will stop if nothing is said until that is certain; None while it would hear more."""
        tracker = self._tracker
        if self._start is None or tracker.run is None or tracker.silence is None:
            return None
        stop = tracker.silence * self.options.window + self._tail
        return stop if stop <= self.position and tracker.long_enough(tracker.run, tracker.silence) else None

    @property
    def keep_from(self) -> int:
        """No boundary to come lies before this sample: earlier audio may be forgotten."""
        if self._start is not None:
            return self._start
        run = self._tracker.run
        first = self._tracker.position if run is None else run.start
        return max(first * self.options.window - self.options.pad, self._last_stop)

    def push(self, prob: float) -> list[Boundary]:
        """The probability of the next window -> the boundaries it made certain, in order."""
        return self._tell(self._tracker.push(prob), self.position)

    def finish(self, num_samples: int | None = None) -> list[Boundary]:
        """The stream is over, after `num_samples` if the last window was not full: the last stop, if one is due."""
        return self._tell(self._tracker.finish(), self.position if num_samples is None else num_samples)

    def _tell(self, ended: list[_Run], heard: int) -> list[Boundary]:
        told: list[Boundary] = []
        for run in ended:
            if self._start is None:
                told.append(self._started(run))
            told.append(self._stopped(run, heard))
        tracker = self._tracker
        now_open = tracker.run if self._start is None and tracker.silence is None else None
        if now_open is not None and tracker.long_enough(now_open, tracker.position):
            told.append(self._started(now_open))
        return told

    def _started(self, run: _Run) -> Boundary:
        window = self.options.window
        first = run.start * window
        self._start = first if run.overlap else max(first - self.options.pad, self._last_stop)
        return Boundary("started", self._start, run.rest, run.overlap * window)

    def _stopped(self, run: _Run, heard: int) -> Boundary:
        room = min(self.options.pad, run.gap * self.options.window // 2) if run.cut else self._tail
        self._last_stop = min(run.end * self.options.window + room, heard)
        self._start = None
        return Boundary("stopped", self._last_stop, run.cut)

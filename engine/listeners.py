"""What is going on with one request of the recogniser: a file being cut into spans, a live stream being heard.

Mechanism is elsewhere: these hold the state and answer what comes next. Positions are samples of the recording.
"""

from __future__ import annotations

import bisect
import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .agreement import LocalAgreement
from .asr_options import decode_options, segmenter_options
from .decode_job import DecodeJob, DecodeOptions, Finished
from .language_choice import LanguageChoice
from .recording import SAMPLE_RATE, Recording
from .segmenter import LiveSegmenter, SegmenterOptions, chunks, speech_regions
from .transcript import WINDOW_SAMPLES, PlacedSegment, Span, Transcript, WindowReader
from .types import AnyEvent, AudioRequest, Done, Segment, Timing, Usage, Word

VAD_WINDOW = 512
_BLOCK = 1875 * VAD_WINDOW  # of a file, heard at once: 60 s
_WARM = 64 * VAD_WINDOW  # heard before each block but the first, so that the detector is warm: 2 s
_PARTIAL_S = 10.0  # a longer open segment is shortened at its front to save work, where its text is settled
_PAUSE = 4096  # windows of less speech between two of speech count as speech: 0.26 s
_SHORTEST = SAMPLE_RATE // 10
# What the detector does not call speech is decoded all the same where it is loud and half believed.
_RESCUE_PROB = 0.2
_RESCUE_RMS = 0.01  # -40 dB of full scale, over half a second


class Labelling(Protocol):
    """Speakers put on segments in bounded steps (diarizer.py)."""

    def step(self) -> list[Segment] | None:
        """None while there is more to do."""
        ...


@dataclass(kw_only=True, eq=False)
class Listening(ABC):
    """Common to files and streams."""

    request: AudioRequest
    recording: Recording
    options: DecodeOptions
    segmenting: SegmenterOptions
    language: LanguageChoice
    reader: WindowReader
    transcript: Transcript
    arrival: float
    to_decode: deque[Span] = field(default_factory=deque)
    num_in_decoder: int = 0
    num_events: int = 0
    closed: bool = False  # no more audio will come
    input_since: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    told_language: LanguageChoice | None = None  # of the last window
    first_result: float | None = None
    first_started: float | None = None

    @property
    def live(self) -> bool:
        return isinstance(self, LiveListening)

    def usage(self) -> Usage:
        return Usage(num_prompt_tokens=self.num_prompt_tokens, num_output_tokens=self.num_output_tokens)

    def stamp(self, event: AnyEvent) -> AnyEvent:
        """The request's next event."""
        event.attempt, event.seq = self.request.attempt, self.num_events
        self.num_events += 1
        return event

    def done(self, now: float) -> Done:
        timing = Timing(
            queue_s=(self.first_started or now) - self.arrival,
            first_token_s=(self.first_result or now) - self.arrival,
            total_s=now - self.arrival,
        )
        return Done(
            request_id=self.request.request_id,
            finish_reason="stop",
            usage=self.usage(),
            timing=timing,
            audio_s=self.recording.num_samples / SAMPLE_RATE,
        )

    @property
    def settled(self) -> int:
        """The sample up to which the text is complete and has been told."""
        oldest = self.transcript.open_from
        return self.recording.num_samples if oldest is None else oldest

    @abstractmethod
    def finished(self) -> bool:
        """Everything has been heard and told."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of audio that nobody will ask for again."""


@dataclass(kw_only=True, eq=False)
class FileListening(Listening):
    """A whole recording. `scan` hears it block by block; then its spans are known."""

    probs: list[float] = field(default_factory=list)
    scanned: bool = False
    kept: list[Segment] = field(default_factory=list)  # segments held back until all are known
    labelling: Labelling | None = None  # of what was kept, when all of it is there

    def finished(self) -> bool:
        return self.scanned and not self.transcript.num_open

    @property
    def can_scan(self) -> bool:
        """Whether there is something to hear: the rest, or a block of what has come so far."""
        if self.scanned:
            return False
        come = self.recording.num_samples - len(self.probs) * VAD_WINDOW
        return self.closed or (self.request.options.vad and come >= _BLOCK)

    def scan(self, vad: Any) -> None:
        """One bounded step of hearing. `vad.file(pcm [T])` gives a probability per window."""
        total = self.recording.num_samples
        if self.closed and total < _SHORTEST:
            self.scanned = True
        elif not self.request.options.vad:
            self._add([Span(start=0, end=total)])
        else:
            start = len(self.probs) * VAD_WINDOW
            warm = min(start, _WARM)
            end = min(start + _BLOCK, total)
            self.probs.extend(vad.file(self.recording.slice(start - warm, end))[warm // VAD_WINDOW :].tolist())
            if self.closed and end >= total:
                self._cut(total)

    def forget(self) -> None:
        if self.request.options.diarize:
            return  # the diarizer hears it once more
        oldest = self.transcript.open_from
        self.recording.forget(self.recording.num_samples if oldest is None else oldest)

    def _cut(self, total: int) -> None:
        regions = speech_regions(self.probs, total, self.segmenting)
        if not regions:
            self._add(self._rescue(total))
        pieces = chunks(regions, self.segmenting.max_speech)
        bare = dataclasses.replace(self.segmenting, pad=0)
        runs = [(region.start, region.end) for region in speech_regions(self.probs, total, bare)]
        spans: list[Span] = []
        for piece in pieces:
            overlap = piece.overlap if spans and spans[-1].forced_cut else 0
            spans.append(
                Span(
                    start=piece.start,
                    end=piece.end,
                    speech=spoken(runs, piece.start, piece.end),
                    forced_cut=piece.forced_cut,
                    overlap=overlap,
                )
            )
        self._add(spans)
        self.probs = []

    def _add(self, spans: list[Span]) -> None:
        self.scanned = True
        for span in spans:
            self.transcript.add(span)
            self.to_decode.append(span)

    def _rescue(self, total: int) -> list[Span]:
        """A span around the likeliest window, where it is loud; nothing for silence and for noise."""
        if not self.probs:
            return []
        best = max(range(len(self.probs)), key=lambda at: self.probs[at])
        if self.probs[best] < _RESCUE_PROB:
            return []
        middle = best * VAD_WINDOW
        near = self.recording.slice(max(0, middle - 4000), middle + 4000)
        if not float(near.square().mean().sqrt()) >= _RESCUE_RMS:
            return []
        start = max(0, min(middle - 5 * SAMPLE_RATE, total - 10 * SAMPLE_RATE))
        return [Span(start=start, end=min(total, start + 10 * SAMPLE_RATE), cautious=True)]


def spoken(runs: Sequence[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Stretches of speech within samples start..end; `runs` are sorted."""
    first = bisect.bisect_left(runs, start, key=lambda run: run[1])
    found: list[tuple[int, int]] = []
    for low, high in runs[first:]:
        if low >= end:
            break
        if min(high, end) > max(low, start):
            found.append((max(low, start), min(high, end)))
    return tuple(found)


@dataclass(kw_only=True, eq=False)
class PartialView:
    """The open segment as it is told while it grows. `start` is where its buffer begins now."""

    agreement: LocalAgreement = field(default_factory=LocalAgreement)
    start: int = 0
    heard: int = 0  # what the last hypothesis had heard
    job: DecodeJob | None = None
    told: str = ""  # the tentative text that was told last
    told_at: float = 0.0  # when, or when speech started
    ids: tuple[int, ...] = ()  # of the last hypothesis: the next one will mostly say the same

    def hear(self, span: Span) -> tuple[list[Word], list[Word]]:
        """A new hypothesis of the open segment: words committed by it, and those that may still change."""
        words = [word for item in span.placed for word in item.words or []]
        committed = self.agreement.update(words)
        ends = [item.segment.end for item in span.placed[:-1]]
        cut = self.agreement.trim_point(
            ends, start=span.start / SAMPLE_RATE, end=span.end / SAMPLE_RATE, target_s=_PARTIAL_S, max_s=2 * _PARTIAL_S
        )
        if cut is not None:
            self.start = max(self.start, round(cut * SAMPLE_RATE))
        return committed, self.agreement.tentative

    def settle(self, span: Span, placed: Sequence[PlacedSegment]) -> list[Word]:
        """The final words of a segment are known: those of them that have not been committed."""
        words = [word for item in placed for word in item.words or []]
        # First what agrees with the last hypothesis, then the rest of the final words.
        committed = self.agreement.update(words) + self.agreement.flush()
        self.agreement.drop(words[-1].end if words and span.forced_cut else span.end / SAMPLE_RATE)
        return committed


@dataclass(kw_only=True, eq=False)
class LookAhead:
    """The open segment, decoded as if it ended at the silence that has just begun: its text, if nothing more is said."""

    span: Span
    job: DecodeJob | None = None
    finished: Finished | None = None


@dataclass(kw_only=True, eq=False)
class LiveListening(Listening):
    """A stream: what has come, what the detector has heard of it, the open segment."""

    slot: int = -1  # of the detector's state
    segmenter: LiveSegmenter
    flushed: bool = False
    heard: int = 0  # samples the detector has seen
    open_start: int | None = None
    open_overlap: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)  # samples of speech, not yet forgotten
    num_noted: int = 0  # windows
    partial: PartialView = field(default_factory=PartialView)
    ahead: LookAhead | None = None

    def finished(self) -> bool:
        return self.flushed and not self.transcript.num_open

    @property
    def num_windows(self) -> int:
        """Windows that can be heard now; the last one of a closed stream is filled up with zeros."""
        left = self.recording.num_samples - self.heard
        return -(-left // VAD_WINDOW) if self.closed else left // VAD_WINDOW

    @property
    def wants_flush(self) -> bool:
        return self.closed and not self.flushed and self.heard >= self.recording.num_samples

    @property
    def behind(self) -> int:
        """Samples that have come and are not dealt with."""
        oldest = self.transcript.open_from
        return self.recording.num_samples - (self.heard if oldest is None else min(self.heard, oldest))

    @property
    def settled(self) -> int:
        oldest = self.transcript.open_from
        return self.segmenter.keep_from if oldest is None else oldest

    def windows(self, most: int) -> torch.Tensor:
        """The next at most `most` windows: fp32 [n * 512]; they count as heard."""
        size = min(self.num_windows, most) * VAD_WINDOW
        piece = self.recording.slice(self.heard, self.heard + size)
        self.heard += size
        if len(piece) < size:
            piece = torch.nn.functional.pad(piece, (0, size - len(piece)))
        return piece

    def forget(self) -> None:
        needed = [self.heard, self.segmenter.keep_from]
        if self.open_start is not None:
            needed.append(min(self.open_start, self.partial.start))
        if (oldest := self.transcript.open_from) is not None:
            needed.append(oldest)
        self.recording.forget(min(needed))
        del self.runs[: bisect.bisect_left(self.runs, min(needed), key=lambda run: run[1])]

    def wants_partial(self) -> bool:
        """Enough new speech in the open segment, and nobody is at it."""
        every = self.request.options.partial_s
        if (
            not every
            or self.open_start is None
            or self.partial.job is not None
            or self.transcript.num_open
            or self.ahead
        ):
            return False
        since = max(self.partial.heard, self.open_start)
        return self.heard - since >= every * SAMPLE_RATE and self.segmenter.quiet_s <= self._pause_s

    @property
    def _pause_s(self) -> float:
        """Silence that has lasted longer will probably end the segment: then a partial would be for nothing."""
        return min(0.25, self.request.options.end_silence_s / 4)

    def partial_span(self) -> Span:
        """The open segment so far, or its end where it has grown too long for a window."""
        assert self.open_start is not None
        view = self.partial
        view.start = max(view.start, self.open_start, self.heard - WINDOW_SAMPLES)
        end = min(self.heard, self.recording.num_samples)
        return Span(start=view.start, end=end, speech=self.spoken(view.start, end), growing=True)

    def note(self, prob: float) -> None:
        """Remember when the detector heard speech; a stream's past is forgotten with its audio."""
        begin = self.num_noted * VAD_WINDOW
        self.num_noted += 1
        runs = self.runs
        if prob >= self.segmenting.threshold:
            if runs and begin - runs[-1][1] < _PAUSE:
                runs[-1] = (runs[-1][0], begin + VAD_WINDOW)
            else:
                runs.append((begin, begin + VAD_WINDOW))

    def spoken(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        return spoken(self.runs, start, end) if self.request.options.vad else ()


def common(
    request: AudioRequest, recording: Recording, model: Any, now: float, *, alignment: bool = False
) -> dict[str, Any]:
    """What files and streams start with: the caller's wishes in ids and samples. They have been checked."""
    options = request.options
    words = options.word_timestamps or options.diarize
    return {
        "request": request,
        "recording": recording,
        "options": decode_options(options, model=model, alignment=words or alignment),
        "segmenting": segmenter_options(options, live=request.open),
        "language": LanguageChoice(options.language if model.tokens.multilingual else "en"),
        "reader": WindowReader(
            tokens=model.tokens,
            tokenizer=model.tokenizer,
            timestamps=options.timestamps,
            words=True,
            logprob_threshold=options.logprob_threshold,
            no_speech_threshold=options.no_speech_threshold,
        ),
        "transcript": Transcript(keep_words=words, hold=not request.open),
        "arrival": now,
        "input_since": now,
    }


def open_live(request: AudioRequest, recording: Recording, model: Any, now: float, *, slot: int) -> LiveListening:
    """A stream that has just begun. Partial results need word times."""
    start = common(request, recording, model, now, alignment=request.options.partial_s > 0)
    return LiveListening(**start, slot=slot, segmenter=LiveSegmenter(start["segmenting"]))

"""Who spoke when: voices of a recording, found without knowing them, put on its words and segments.

    diarizer = Diarizer(encoder, num_speakers=None, known=(("Ann", ann_pcm),))
    diarizer.add(pcm, start_s, regions)      # as the audio comes, a minute or so a call; keeps vectors, not audio
    turns = diarizer.turns()                 # [Turn(start, end, "SPEAKER_00"), ...]
    segments = label(segments, turns)

`Diarization` does it all in bounded steps, `diarize` at once. Policy lives here and in `speaker_clusters.py`; the encoder makes
vectors of spans and knows nothing else. Speech is cut at pauses into runs; runs into windows of 1.6 s, 0.8 s apart;
windows are clustered; then cells of 0.2 s take the voice whose path over time fits best, switching dear within a run
and cheap at a pause. Overlapping speech goes to one of the voices.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from .errors import InvalidRequest
from .speaker_clusters import Array, find_voices, walk_best_path
from .types import Segment, TranscribeOptions, Word

SAMPLE_RATE = 16_000
_WINDOW = 25_600
_CELL_S = 0.2
_FRAME = 160
_SILENCE_DB = -90.0  # of full scale: about one step of 16 bits
_MIN_LOUD = 3  # frames: less is a click
_BLOCK_S = 30.0
_MAX_KNOWN = 64
_LABELLED = 500  # segments in one step
_MAX_VOICE_S = 60.0
_MIN_VOICE_S = 0.5


class VoiceEncoder(Protocol):
    """What the diarizer needs of `models/speaker.py:SpeakerEncoder`."""

    def embed_spans(self, pcm: Tensor, spans: Sequence[tuple[int, int]], loudness: Sequence[float]) -> Tensor: ...
    def voice(self, pcm: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class DiarizerPolicy:
    """The numbers, chosen for the GE2E encoder on simulated talks of eight real voices.

    Two windows of one voice are 0.72 alike, of two voices 0.46.
    """

    step_s: float = 0.8  # between windows
    pause_s: float = 0.2  # quiet this long ends a run
    quiet_db: float = 30.0  # below the loud frames of its region...
    above_noise_db: float = 6.0  # ...or this little above its quietest frames, in noise
    min_run_s: float = 0.4  # shorter runs get no vector; their neighbours decide
    voice_similarity: float = 0.8  # across two groups of windows, over that within them: above, they are one voice
    known_similarity: float = 0.76  # to an enrolled voice: with 3 s of it 0.84 and more, others up to that
    known_window_similarity: float = 0.65  # of one window to an enrolled voice
    min_voice_share: float = 0.02  # of all windows, at most `max_noise_windows`: less is noise, not a voice
    max_noise_windows: int = 3
    max_clustered: int = 2000
    max_voices: int = 32
    switch_in_run: float = 0.5  # scores are similarities: two voices differ by about 0.25 a cell
    switch_at_pause: float = 0.15


@dataclass(frozen=True)
class Turn:
    """One voice, without a break of another. Seconds."""

    start: float
    end: float
    speaker: str


@dataclass
class _Run:
    """Speech between two pauses: its time in seconds and its windows (`centres` in seconds, rows `first`.. of the vectors)."""

    start: float
    end: float
    first: int
    centres: list[float] = field(default_factory=list)


class Diarizer:
    """One recording. Memory: 0.5 kB a window, some 9 MB for 4 hours."""

    def __init__(
        self,
        encoder: VoiceEncoder,
        *,
        num_speakers: int | None = None,
        known: Sequence[tuple[str, Tensor]] = (),
        policy: DiarizerPolicy | None = None,
    ) -> None:
        """`known`: names with a voice each, f32 [T] at 16 kHz, 0.5 s at least. Raises InvalidRequest."""
        if num_speakers is not None and num_speakers < 1:
            raise InvalidRequest("num_speakers is at least 1", param="num_speakers")
        if len(known) > _MAX_KNOWN:
            raise InvalidRequest(f"at most {_MAX_KNOWN} known speakers", param="known_speakers")
        self._encoder = encoder
        self._num_speakers = num_speakers
        self._policy = policy or DiarizerPolicy()
        self._names = [name for name, _ in known]
        self._known: list[Array] = []
        self._to_enrol = deque(_checked_voice(name, pcm) for name, pcm in known)
        self._vectors: list[Array] = []  # float16 blocks [n, D]
        self._whole: list[bool] = []  # whether the window is a full one
        self._runs: list[_Run] = []

    def enrol(self) -> bool:
        """Hear one more of the known voices, up to a minute of it; False when all are known."""
        if self._to_enrol:
            self._known.append(_unit(self._encoder.voice(self._to_enrol.popleft())))
        return bool(self._to_enrol)

    def add(self, pcm: Tensor, start_s: float = 0.0, regions: Iterable[tuple[float, float]] | None = None) -> None:
        """Hear the speech in `regions` (seconds of the recording) of `pcm` f32 [T], which begins at `start_s`.

        None: all of it is speech. Calls go forward in time. Cost and memory grow with `pcm`: a minute or so a call.
        """
        if regions is None:
            regions = [(start_s, start_s + pcm.shape[0] / SAMPLE_RATE)]
        spans: list[tuple[int, int]] = []
        loudness: list[float] = []
        for lo, hi in regions:
            first = min(max(0, round((lo - start_s) * SAMPLE_RATE)), pcm.shape[0])
            last = min(max(first, round((hi - start_s) * SAMPLE_RATE)), pcm.shape[0])
            for run_lo, run_hi, rms in self._runs_of(pcm[first:last]):
                run = _Run(
                    start_s + (first + run_lo) / SAMPLE_RATE,
                    start_s + (first + run_hi) / SAMPLE_RATE,
                    len(self._whole),
                )
                self._runs.append(run)
                if run_hi - run_lo < self._policy.min_run_s * SAMPLE_RATE:
                    continue
                for window_lo, window_hi in _windows(first + run_lo, first + run_hi, self._policy.step_s):
                    spans.append((window_lo, window_hi))
                    loudness.append(rms)
                    run.centres.append(start_s + (window_lo + window_hi) / 2 / SAMPLE_RATE)
                    self._whole.append(window_hi - window_lo >= _WINDOW)
        if spans:
            vectors = self._encoder.embed_spans(pcm, spans, loudness)
            self._vectors.append(vectors.nan_to_num(0.0).to("cpu", torch.float16).numpy())

    def _runs_of(self, pcm: Tensor) -> Iterator[tuple[int, int, float]]:
        """Runs of speech in one region f32 [T], as samples [lo, hi) with their RMS; cut where it is quiet."""
        num_frames = pcm.shape[0] // _FRAME
        if num_frames == 0:
            return
        power = pcm[: num_frames * _FRAME].reshape(num_frames, _FRAME).square().mean(1).nan_to_num(0.0).cpu().numpy()
        level = 10 * np.log10(power + 1e-12)
        high, low = np.percentile(level, (95, 5))
        # Where noise fills the pauses, they are what is hardly above the quietest frames.
        quiet = max(high - self._policy.quiet_db, min(low + self._policy.above_noise_db, high - 12), _SILENCE_DB)
        loud = 10 * np.log10(np.convolve(power, np.full(3, 1 / 3), "same")[:num_frames] + 1e-12) > quiet
        (edges,) = np.nonzero(np.diff(np.concatenate(([False], loud, [False])).astype(np.int8)))
        lo = hi = -1
        pause = round(self._policy.pause_s * SAMPLE_RATE / _FRAME)
        for start, end in edges.reshape(-1, 2).tolist():
            if end - start < _MIN_LOUD:
                continue
            if lo < 0:
                lo = start
            elif start - hi >= pause:
                yield lo * _FRAME, hi * _FRAME, float(np.sqrt(power[lo:hi].mean()))
                lo = start
            hi = end
        if lo >= 0:
            yield lo * _FRAME, hi * _FRAME, float(np.sqrt(power[lo:hi].mean()))

    def turns(self) -> list[Turn]:
        """Voices over time so far, in order, named by order of appearance ("SPEAKER_00"...) or by enrolment."""
        return _run_out(self.find_turns())

    def find_turns(self) -> Generator[None, None, list[Turn]]:
        """`turns` as its return value; yields between pieces of work, of some 0.1 s each for a recording of 4 hours."""
        while self.enrol():
            yield
        if not self._runs:
            return []
        vectors = np.concatenate(self._vectors).astype(np.float32) if self._vectors else np.zeros((0, 1), np.float32)
        voices = self._voices(vectors)
        yield
        if len(voices) == 0:  # nothing long enough to tell voices apart
            voices = np.zeros((1, vectors.shape[1]), np.float32)
        names, voices = self._named(vectors, voices)
        scores, switch, cells = self._cells(vectors @ voices.T)
        yield
        path = yield from walk_best_path(scores, switch)
        return _join(cells, path.tolist(), names)

    def _voices(self, vectors: Array) -> Array:
        policy = self._policy
        whole = np.array(self._whole, bool)
        # Short windows say little: they take part in finding voices only where there is nothing else.
        heard = vectors[whole] if whole.sum() >= max(1, self._num_speakers or 1) else vectors
        num = None if self._num_speakers is None else min(self._num_speakers, len(heard))
        return find_voices(
            heard,
            num=num,
            similarity=policy.voice_similarity,
            min_size=max(1, min(policy.max_noise_windows, round(policy.min_voice_share * len(heard)))),
            max_clustered=policy.max_clustered,
            max_voices=policy.max_voices,
        )

    def _named(self, vectors: Array, voices: Array) -> tuple[list[str | None], Array]:
        """The enrolled name of each voice, or None. Several may have one name, unless a number of speakers was asked for.

        An enrolled voice that many windows fit better than any voice found here was swallowed by another: it is added.
        """
        if not self._known:
            return [None] * len(voices), voices
        policy = self._policy
        known = np.stack(self._known)
        alike = voices @ known.T  # [K, known]
        names: list[str | None] = [None] * len(voices)
        if self._num_speakers is not None:
            for voice, name in zip(*linear_sum_assignment(-alike)):
                if alike[voice, name] >= policy.known_similarity:
                    names[voice] = self._names[name]
            return names, voices
        for voice, name in enumerate(alike.argmax(1).tolist()):
            if alike[voice, name] >= policy.known_similarity:
                names[voice] = self._names[name]
        fits = vectors @ known.T  # [N, known]
        better = (fits > (vectors @ voices.T).max(1, keepdims=True)) & (fits >= policy.known_window_similarity)
        for name in np.flatnonzero(better.sum(0) > policy.max_noise_windows).tolist():
            voices = np.concatenate([voices, known[name : name + 1]])
            names.append(self._names[name])
        return names, voices

    def _cells(self, alike: Array) -> tuple[Array, Array, list[tuple[float, float]]]:
        """Scores [T, K] of all cells, what a switch before each costs [T], and their times, from windows' [N, K]."""
        policy = self._policy
        scores: list[Array] = []
        costs: list[Array] = []
        times: list[tuple[float, float]] = []
        for index, run in enumerate(self._runs):
            count = max(1, round((run.end - run.start) / _CELL_S))
            edges = np.linspace(run.start, run.end, count + 1)
            if run.centres:
                away = np.abs((edges[:-1] + edges[1:])[:, None] / 2 - np.array(run.centres)[None, :])
                weight = np.maximum(1.0 - away / policy.step_s, 0.0) + 1e-3
                weight /= weight.sum(1, keepdims=True)
                scores.append((weight @ alike[run.first : run.first + len(run.centres)]).astype(np.float32))
            else:
                scores.append(np.zeros((count, alike.shape[1]), np.float32))
            cost = np.full(count, policy.switch_in_run, np.float32)
            if index:
                cost[0] = policy.switch_at_pause
            costs.append(cost)
            times += itertools.pairwise(edges.tolist())
        return np.concatenate(scores), np.concatenate(costs), times


def label(segments: Sequence[Segment], turns: Sequence[Turn]) -> list[Segment]:
    """New segments with speakers: each word that of the longest overlap, of the nearest turn where there is none.

    A segment with words is split where the speaker changes, and ids are counted anew; the pieces' `tokens` are empty,
    as words do not know theirs. A segment without words takes the speaker of most of its time.
    """
    return _run_out(_labels(segments, turns))


def _labels(segments: Sequence[Segment], turns: Sequence[Turn]) -> Generator[None, None, list[Segment]]:
    if not turns:
        return list(segments)
    by_time = _TurnIndex(turns)
    result: list[Segment] = []
    next_id = segments[0].id if segments else 0
    for number, segment in enumerate(segments, 1):
        for piece in _pieces(segment, by_time):
            result.append(msgspec.structs.replace(piece, id=next_id))
            next_id += 1
        if number % _LABELLED == 0:
            yield
    return result


def _run_out(work: Generator[None, None, list[Any]]) -> list[Any]:
    """What a generator returns when nobody waits in between."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return list(end.value)


class Diarization:
    """A recording of any length in steps of bounded work, for a loop that has other things to do in between.

    diarization = Diarization(recording.slice, segments, options, encoder)
    while (labelled := diarization.step()) is None: ...
    """

    def __init__(
        self,
        read: Callable[[int, int], Tensor],
        segments: Sequence[Segment],
        options: TranscribeOptions,
        encoder: VoiceEncoder,
        *,
        regions: Iterable[tuple[float, float]] | None = None,
        policy: DiarizerPolicy | None = None,
    ) -> None:
        """`read(start, end)` gives the samples [start, end) at 16 kHz as f32; see `diarize` for the rest."""
        known = [(name, samples_of(name, voice)) for name, voice in options.known_speakers]
        self._diarizer = Diarizer(encoder, num_speakers=options.num_speakers, known=known, policy=policy)
        self._read = read
        self._segments = segments
        self._work = self._run(_blocks(regions if regions is not None else speech_of(segments)))

    def step(self) -> list[Segment] | None:
        """Hear the next half minute of speech (some 50 ms on 2 CPU cores), later find the voices, later label; at last the
        labelled segments. None means that there is more to do."""
        return next(self._work)

    def _run(self, blocks: Iterator[list[tuple[float, float]]]) -> Iterator[list[Segment] | None]:
        for block in blocks:
            first = max(0, int(block[0][0] * SAMPLE_RATE))
            pcm = self._read(first, max(first, round(block[-1][1] * SAMPLE_RATE)))
            self._diarizer.add(pcm, first / SAMPLE_RATE, block)
            yield None
        turns = yield from self._diarizer.find_turns()
        yield None
        yield (yield from _labels(self._segments, turns))


def diarize(
    pcm: Tensor,
    segments: Sequence[Segment],
    options: TranscribeOptions,
    encoder: VoiceEncoder,
    *,
    regions: Iterable[tuple[float, float]] | None = None,
    policy: DiarizerPolicy | None = None,
) -> list[Segment]:
    """`segments` of the recording `pcm` f32 [T] (16 kHz) with speakers on them and their words: see `label`.

    `regions`: where speech is, in seconds (voice activity); None: where the segments and their words are.
    """

    def read(start: int, end: int) -> Tensor:
        return pcm[start:end]

    work = Diarization(read, segments, options, encoder, regions=regions, policy=policy)
    while (labelled := work.step()) is None:
        pass
    return labelled


def samples_of(name: str, voice: bytes) -> Tensor:
    """The f32 [T] samples of a known speaker's voice as it stands in `TranscribeOptions`. Raises InvalidRequest."""
    if len(voice) % 4 or not voice:
        raise InvalidRequest(f"the voice of known speaker {name!r} is not float32 PCM", param="known_speakers")
    return torch.frombuffer(bytearray(voice[: 4 * int(_MAX_VOICE_S * SAMPLE_RATE)]), dtype=torch.float32)


def speech_of(segments: Sequence[Segment], gap_s: float = 0.5) -> list[tuple[float, float]]:
    """Where speech is, by the times of words, or of segments without words: spans in seconds, those close joined."""
    spans = sorted(
        span
        for segment in segments
        for span in ([(word.start, word.end) for word in segment.words or ()] or [(segment.start, segment.end)])
    )
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] < gap_s:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _blocks(regions: Iterable[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """`regions` in groups that span at most `_BLOCK_S`; longer ones are cut."""
    block: list[tuple[float, float]] = []
    for start, end in regions:
        while start < end:
            piece = (start, min(end, start + _BLOCK_S))
            if block and piece[1] - block[0][0] > _BLOCK_S:
                yield block
                block = []
            block.append(piece)
            start = piece[1]
    if block:
        yield block


def _windows(start: int, end: int, step_s: float) -> list[tuple[int, int]]:
    """Spans of 1.6 s that cover [start, end) evenly, starts at most `step_s` apart; shorter speech is one span."""
    spare = end - start - _WINDOW
    if spare <= 0:
        return [(start, end)]
    steps = -(-spare // round(step_s * SAMPLE_RATE))
    return [(start + spare * i // steps, start + spare * i // steps + _WINDOW) for i in range(steps + 1)]


def _checked_voice(name: str, pcm: Tensor) -> Tensor:
    if not name or len(name) > 100:
        raise InvalidRequest("a known speaker has a name of 1 to 100 characters", param="known_speakers")
    if pcm.shape[0] < _MIN_VOICE_S * SAMPLE_RATE:
        raise InvalidRequest(
            f"the voice of known speaker {name!r} is shorter than {_MIN_VOICE_S} s", param="known_speakers"
        )
    if not bool(torch.isfinite(pcm).all()) or not bool(pcm.any()):
        raise InvalidRequest(f"the voice of known speaker {name!r} is silent or not finite", param="known_speakers")
    return pcm[: int(_MAX_VOICE_S * SAMPLE_RATE)]


def _unit(vector: Tensor) -> Array:
    array: Array = vector.float().cpu().numpy()
    return array


def _join(cells: list[tuple[float, float]], labels: list[int], names: list[str | None]) -> list[Turn]:
    """Turns of neighbouring cells of one voice. Unknown voices are numbered by order of appearance."""
    turns: list[Turn] = []
    called = dict(enumerate(names))
    numbers = itertools.count()
    for (start, end), voice in zip(cells, labels):
        speaker = called[voice]
        if speaker is None:
            speaker = called[voice] = f"SPEAKER_{next(numbers):02d}"
        if turns and turns[-1].speaker == speaker:
            turns[-1] = Turn(turns[-1].start, end, speaker)
        else:
            turns.append(Turn(start, end, speaker))
    return turns


class _TurnIndex:
    """Turns by time. They are in order and do not overlap."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._ends = np.array([turn.end for turn in turns])

    def speaker(self, start: float, end: float) -> str:
        """Who speaks longest between `start` and `end`; nobody: who is nearest."""
        first = int(np.searchsorted(self._ends, start, "right"))
        share: dict[str, float] = {}
        for turn in itertools.islice(self._turns, first, None):
            if turn.start >= end:
                break
            share[turn.speaker] = share.get(turn.speaker, 0.0) + min(end, turn.end) - max(start, turn.start)
        if share:
            return max(share, key=lambda speaker: share[speaker])
        around = self._turns[max(0, first - 1) : first + 1]
        return min(around, key=lambda turn: max(turn.start - end, start - turn.end)).speaker


def _pieces(segment: Segment, turns: _TurnIndex) -> list[Segment]:
    if not segment.words:
        return [msgspec.structs.replace(segment, speaker=turns.speaker(segment.start, segment.end))]
    words = [
        msgspec.structs.replace(word, speaker=turns.speaker(word.start, max(word.end, word.start + 1e-3)))
        for word in segment.words
    ]
    groups: list[list[Word]] = [list(group) for _, group in itertools.groupby(words, key=lambda word: word.speaker)]
    if len(groups) == 1:
        return [msgspec.structs.replace(segment, words=words, speaker=words[0].speaker)]
    return [
        msgspec.structs.replace(
            segment,
            start=segment.start if index == 0 else group[0].start,
            end=segment.end if index == len(groups) - 1 else group[-1].end,
            text="".join(word.word for word in group),
            tokens=[],
            words=group,
            speaker=group[0].speaker,
        )
        for index, group in enumerate(groups)
    ]

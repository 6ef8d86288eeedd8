"""A direct synthesizer as an engine of the host: utterances in, audio out, no language model between (models/synthesizer.py).

Whole utterances are computed in a worker thread, one at a time: the host's loop only starts them and tells what came of them,
so that other engines' steps go on meanwhile. (The graph runs outside of the interpreter's lock, on its own few threads.)
Whose utterance is next follows from the listeners' clocks: who runs out first is served first. Not thread-safe: the host's
loop is the only caller.

A request's `seed` has no effect, for these graphs draw their noise themselves; `temperature` scales the voice's noise, and 0
makes the same prompt sound the same. The other sampling parameters mean nothing to a synthesizer.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.signal import resample_poly

from ..models.registry import resolve
from ..models.speech_format import SAMPLE_RATE, SpeechFormat
from ..models.synthesizer import PiperSynthesizer, Samples, Synthesizer, load_synthesizer_format
from .config import HostConfig
from .errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    ModelLoadError,
    to_info,
)
from .params import check_params
from .speech_engine import FIRST_AUDIO_BUCKETS, FIRST_AUDIO_S
from .speech_params import check_append
from .types import (
    Aborted,
    AnyEvent,
    AnyRequest,
    Audio,
    Done,
    EmbeddingSpan,
    Failed,
    ModelInfo,
    SpeechRequest,
    Timing,
    Usage,
)

_POLL_S = 0.004  # how late the end of an utterance may be seen when nobody else has work
_PIECE = SAMPLE_RATE  # samples of one event: a second
_MAX_IDS = 4096  # of an utterance
_MAX_UTTERANCES = 4096  # not spoken yet, of one request


@dataclass(kw_only=True, eq=False)
class _Speaking:
    """State of one request. Its listener plays what was sent from the first audio on; `runs_out` is when that ends."""

    request: SpeechRequest
    order: int
    arrival: float
    due: float  # when the first audio of this spell is wanted
    input_since: float
    closed: bool
    waiting: deque[list[int]]
    number: int = 0  # of the utterance that is computed next
    busy: bool = False  # one of its utterances is in the worker
    started: float | None = None  # the listener's clock
    sent_s: float = 0.0  # since then
    total_s: float = 0.0
    first_scheduled: float | None = None
    first_audio: float | None = None
    num_prompt_tokens: int = 0
    num_events: int = 0

    @property
    def runs_out(self) -> float:
        return self.due if self.started is None else self.started + self.sent_s

    @property
    def ended(self) -> bool:
        return self.closed and not self.waiting and not self.busy

    def usage(self) -> Usage:
        return Usage(num_prompt_tokens=self.num_prompt_tokens)

    def stamp(self, event: AnyEvent) -> AnyEvent:
        event.attempt = self.request.attempt
        event.seq = self.num_events
        self.num_events += 1
        return event


@dataclass(kw_only=True)
class _Counters:
    num_requests: int = 0
    num_steps: int = 0
    num_utterances: int = 0
    num_prompt_tokens: int = 0
    num_underruns: int = 0
    num_cut: int = 0
    audio_s: float = 0.0
    underrun_s: float = 0.0
    busy_s: float = 0.0
    first_audio: list[int] = field(default_factory=lambda: [0] * (len(FIRST_AUDIO_BUCKETS) + 1))
    first_audio_s: float = 0.0


class SynthesizerEngine:
    """One voice. `clock` gives seconds, monotonic."""

    kind = "tts"

    def __init__(
        self,
        *,
        info: ModelInfo,
        synthesizer: Synthesizer,
        format: SpeechFormat,
        clock: Callable[[], float] = time.monotonic,
        input_timeout_s: float = 300.0,
    ) -> None:
        self.info = info
        self.format = format
        self.synthesizer = synthesizer
        self.counters = _Counters()
        self.last_error: BaseException | None = None
        self._clock = clock
        self._input_timeout_s = input_timeout_s
        self._requests: dict[str, _Speaking] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="motet-synthesizer")
        self._job: tuple[_Speaking, list[int], Future[tuple[Samples, float]]] | None = None

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, request: AnyRequest) -> None:
        """Start speaking. Raises InvalidRequest (or a kind of it) when it can never work; nothing is kept then."""
        if not isinstance(request, SpeechRequest):
            raise InvalidRequest(f"model {self.info.model!r} is a voice and takes speech requests", param="model")
        if request.request_id in self._requests:
            raise DuplicateRequest("request_id: this id is already running", param="request_id")
        if not request.utterances and not request.open:
            raise InvalidRequest("input: expected something to speak, got none", param="input")
        if len(request.utterances) > _MAX_UTTERANCES:
            raise InvalidRequest(f"input: {len(request.utterances)} utterances are too many at once", param="input")
        if request.params is not None:
            check_params(request.params, self.info.vocab_size)
        for prompt in request.utterances:
            self._check(prompt)
        now = self._clock()
        self.counters.num_requests += 1
        self._requests[request.request_id] = _Speaking(
            request=request,
            order=self.counters.num_requests,
            arrival=now,
            due=now + self._goal(request),
            input_since=now,
            closed=not request.open,
            waiting=deque(request.utterances),
            num_prompt_tokens=sum(len(prompt) for prompt in request.utterances),
        )

    def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        """One more utterance of an open request; `last` closes it, alone (without ids) or with it. Raises InvalidRequest."""
        speaking = self._requests.get(request_id)
        is_open = speaking is not None and not speaking.closed
        check_append(token_ids, last=last, is_open=is_open, has_other=bool(pcm or embeddings))
        assert speaking is not None
        now = self._clock()
        if token_ids:
            self._check(token_ids)
            if len(speaking.waiting) >= _MAX_UTTERANCES:
                raise InvalidRequest(f"append: {_MAX_UTTERANCES} utterances wait already", param="token_ids")
            if not speaking.waiting and not speaking.busy and now >= speaking.runs_out:
                speaking.started, speaking.sent_s = (
                    None,
                    0.0,
                )  # a pause in which nothing was to be said is nobody's fault
                speaking.due = now + self._goal(speaking.request)
            speaking.waiting.append(token_ids)
            speaking.num_prompt_tokens += len(token_ids)
        speaking.input_since = now
        speaking.closed = last

    def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None:
        """A new priority, or a new goal for the first audio in seconds from submit. Unknown ids may just have ended."""
        speaking = self._requests.get(request_id)
        if speaking is None:
            return
        if priority is not None:
            speaking.request.priority = priority
        if deadline is not None:
            speaking.request.deadline = deadline
            if speaking.first_audio is None:
                speaking.due = speaking.arrival + deadline

    def abort(self, request_id: str, reason: str) -> list[AnyEvent]:
        """End a request now; an utterance in the worker is computed to its end and dropped."""
        speaking = self._requests.pop(request_id, None)
        if speaking is None:
            return []
        return [speaking.stamp(Aborted(request_id=request_id, reason=reason, usage=speaking.usage()))]

    # ------------------------------------------------------------------------------------------- for the arbiter

    def has_work(self) -> bool:
        """Whether a step would start or tell something now; what the worker is at is no work for the loop."""
        if self._job is not None:
            return self._job[2].done() or any(one.ended for one in self._requests.values())
        return any(one.waiting or one.ended for one in self._requests.values())

    def num_requests(self) -> int:
        return len(self._requests)

    def next_deadline(self) -> float | None:
        """The earliest time at which a listener who is owed something must get it, on this engine's clock."""
        return min((one.runs_out for one in self._requests.values() if one.waiting or one.busy), default=None)

    def best_priority(self) -> int:
        return min((one.request.priority for one in self._requests.values()), default=0)

    def next_timer(self) -> float | None:
        timers = [one.input_since + self._input_timeout_s for one in self._starving()]
        if self._job is not None:
            timers.append(self._clock() + _POLL_S)
        return min(timers, default=None)

    # ---------------------------------------------------------------------------------------------------- steps

    def step(self, slack_s: float | None = None) -> list[AnyEvent]:
        """Tell what the worker has finished, give it the next utterance. Takes no longer than that, whatever the slack."""
        now = self._clock()
        self.counters.num_steps += 1
        events: list[AnyEvent] = []
        for starving in self._starving():
            if now - starving.input_since >= self._input_timeout_s:
                events += self.abort(starving.request.request_id, "input_timeout")
        if self._job is not None and self._job[2].done():
            events += self._land(now)
        if self._job is None:
            self._start(now)
        for one in [one for one in self._requests.values() if one.ended]:
            events += self._finish(one, now)
        return events

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; counters only grow. Words as in SpeechEngine."""
        c, requests = self.counters, self._requests.values()
        buckets, total = [], 0
        for le, count in zip([*FIRST_AUDIO_BUCKETS, None], c.first_audio, strict=True):
            total += count
            buckets.append([le, total])
        return {
            "running": sum(one.busy for one in requests),
            "waiting": sum(bool(one.waiting) and not one.busy for one in requests),
            "waiting_for_input": len(self._starving()),
            "requests": len(requests),
            "active_streams": sum(bool(one.waiting) or one.busy for one in requests),
            "prompt_tokens": c.num_prompt_tokens,
            "generation_tokens": 0,
            "steps": c.num_steps,
            "utterances": c.num_utterances,
            "cut_utterances": c.num_cut,
            "speech_seconds": c.audio_s,
            "underruns": c.num_underruns,
            "underrun_seconds": c.underrun_s,
            "busy_seconds": c.busy_s,
            "first_audio": {"buckets": buckets, "sum": c.first_audio_s},
        }

    def close(self) -> None:
        """Forget all requests; an utterance in the worker is not waited for."""
        self._requests.clear()
        self._worker.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------- insides

    @staticmethod
    def _goal(request: SpeechRequest) -> float:
        return FIRST_AUDIO_S if request.deadline is None else request.deadline

    def _check(self, prompt: Sequence[int]) -> None:
        if len(prompt) < 2:
            raise InvalidRequest("input: expected a speaker and ids of sounds in every utterance", param="input")
        if len(prompt) > self.info.max_model_len:
            raise ContextLengthExceeded(
                f"input: an utterance has at most {self.info.max_model_len} ids, got {len(prompt)}", param="input"
            )
        if not 0 <= prompt[0] < len(self.format.voices):
            raise InvalidRequest(f"input: expected a speaker in [0, {len(self.format.voices)})", param="input")
        if not (0 <= min(prompt) and max(prompt[1:]) < self.info.vocab_size):
            raise InvalidRequest(f"input: expected ids of sounds in [0, {self.info.vocab_size})", param="input")

    def _starving(self) -> list[_Speaking]:
        return [one for one in self._requests.values() if not one.closed and not one.waiting and not one.busy]

    def _start(self, now: float) -> None:
        """Give the worker an utterance of whoever runs out first; those who have a second or more left go by priority."""
        ready = [one for one in self._requests.values() if one.waiting]
        if not ready:
            return
        urgent = [one for one in ready if one.runs_out - now < 1.0]
        one = min(urgent, key=lambda s: (s.runs_out, s.order)) if urgent else min(ready, key=_by_priority)
        prompt = one.waiting.popleft()
        one.busy = True
        if one.first_scheduled is None:
            one.first_scheduled = now
        self.counters.num_prompt_tokens += len(prompt)
        noise = 1.0 if one.request.params is None else one.request.params.temperature
        self._job = (one, prompt, self._worker.submit(self._compute, prompt, noise))

    def _compute(self, prompt: list[int], noise: float) -> tuple[Samples, float]:
        """In the worker: samples fp32 [n] at 24 kHz, and the seconds that they took."""
        began = time.perf_counter()
        samples, rate = self.synthesizer.synthesize(prompt, noise=noise), self.synthesizer.sample_rate
        if rate != SAMPLE_RATE and len(samples):
            shared = math.gcd(rate, SAMPLE_RATE)
            samples = resample_poly(samples, SAMPLE_RATE // shared, rate // shared).astype(np.float32)
        return samples, time.perf_counter() - began

    def _land(self, now: float) -> list[AnyEvent]:
        """The worker's answer as audio of its request, if that still lives."""
        assert self._job is not None
        one, prompt, future = self._job
        self._job, one.busy = None, False
        request_id = one.request.request_id
        alive = self._requests.get(request_id) is one
        error = future.exception()
        if error is not None:
            self.last_error = error
            if not alive:
                return []
            del self._requests[request_id]
            return [one.stamp(Failed(request_id=request_id, error=to_info(error)))]
        samples, seconds = future.result()
        self.counters.busy_s += seconds
        if not alive:
            return []
        most = int(self.format.max_seconds(prompt) * SAMPLE_RATE)
        if len(samples) > most:  # longer than any speech of so few sounds: it did not find its end
            self.counters.num_cut += 1
            samples = samples[:most]
        number, one.number = one.number, one.number + 1
        self._heard(one, len(samples) / SAMPLE_RATE, now)
        ints = (samples.clip(-1.0, 1.0) * 32767.0).round().astype("<i2")
        events: list[AnyEvent] = []
        for start in range(0, max(1, len(ints)), _PIECE):
            piece = ints[start : start + _PIECE].tobytes()
            last = start + _PIECE >= len(ints)
            events.append(one.stamp(Audio(request_id=request_id, pcm=piece, utterance=number, last=last)))
        return events

    def _heard(self, one: _Speaking, seconds: float, now: float) -> None:
        """Audio leaves: the listener's clock, and what metrics want to know."""
        c = self.counters
        c.num_utterances += 1
        c.audio_s += seconds
        one.total_s += seconds
        if one.first_audio is None:
            one.first_audio = now
            waited = now - one.arrival
            c.first_audio[sum(waited > le for le in FIRST_AUDIO_BUCKETS)] += 1
            c.first_audio_s += waited
        if one.started is None:
            one.started, one.sent_s = now, 0.0
        elif now > one.runs_out:
            c.num_underruns += 1
            c.underrun_s += now - one.runs_out
            one.started = now - one.sent_s
        one.sent_s += seconds

    def _finish(self, one: _Speaking, now: float) -> list[AnyEvent]:
        request_id = one.request.request_id
        del self._requests[request_id]
        timing = Timing(
            queue_s=(one.first_scheduled or now) - one.arrival,
            first_token_s=(one.first_audio or now) - one.arrival,
            total_s=now - one.arrival,
        )
        done = Done(request_id=request_id, finish_reason="stop", usage=one.usage(), timing=timing, audio_s=one.total_s)
        return [one.stamp(done)]


def _by_priority(one: _Speaking) -> tuple[int, float, int]:
    return (one.request.priority, one.runs_out, one.order)


def load_synthesizer(
    name: str,
    config: HostConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> SynthesizerEngine:
    """A warm synthesizer. Raises ModelNotFound or ModelLoadError (which also names the extra or program that is missing)."""
    report("resolve")
    path = resolve(name).path
    format = load_synthesizer_format(path)
    report("weights")
    # Its worker runs beside the other engines' steps, which want the cores too: half of them are enough for many times real time.
    threads = max(1, (config.threads or os.cpu_count() or 1) // 2)
    synthesizer = PiperSynthesizer.load(path, threads=threads)
    report("warm-up")
    try:
        format.sounds("a")  # asks espeak-ng, where it is asked at all, whether it knows the voice's language
    except InternalError as error:
        raise ModelLoadError(f"{path.name}: {error.message}") from None
    ids = format.description.phoneme_id_map
    synthesizer.synthesize([0, *ids["^"], *ids["_"], *ids["$"]])
    report("ready")
    return SynthesizerEngine(
        info=ModelInfo(
            model=name,
            kind="tts",
            source=str(path),
            max_model_len=_MAX_IDS,
            vocab_size=format.description.num_symbols,
            hidden_size=0,
            dtype="float32",
            extra={
                "family": format.family,
                "voices": list(format.voices),
                "default_voice": format.default_voice,
                "language": format.language,
                "sample_rate": format.sample_rate,
                "max_chars": format.max_chars,
                "threads": threads,
            },
        ),
        synthesizer=synthesizer,
        format=format,
        clock=clock,
        input_timeout_s=config.engine.input_timeout_s,
    )

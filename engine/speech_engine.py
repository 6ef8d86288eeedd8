"""The voice: utterances in, audio out. A language model of codec tokens (an LLMEngine) and a codec, as one engine of the host.

A step is one bounded piece of work: the codec turns frames that are due into audio, or the LM gives every running utterance
its next token. Audio goes first. Whose turn it is follows from the listeners' clocks (speaking.py): while somebody waits for
the first audio or is about to run out, those with plenty to play are held back. Utterances of all requests share the LM's
batch and the codec's. Not thread-safe: the host's loop is the only caller.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..models.speech_format import SpeechFormat
from .errors import ContextLengthExceeded, DuplicateRequest, InternalError, InvalidRequest, to_info
from .llm_engine import LLMEngine
from .params import check_params
from .scheduler import Counters
from .silence import SilenceTrimmer
from .speaking import Speaking
from .speech_params import check_append, phase_mask, phase_params
from .types import (
    Aborted,
    AnyEvent,
    AnyRequest,
    Audio,
    Done,
    EmbeddingSpan,
    Failed,
    ModelInfo,
    Request,
    SpeechRequest,
    Timing,
    Tokens,
)

FIRST_AUDIO_S = 0.15  # goal from an utterance's arrival to its first audio
FIRST_AUDIO_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
_MARGIN_S = 0.5  # audio is due so long before a listener runs out, and the time that making it takes
_NEAR_S = 0.75  # who has less than this to play is near running out
_FAR_S = 2.0  # who has more than this waits while somebody is near
_MOST_FRAMES = 12  # of one stream in one step of the codec
_CODEC_S = 0.06  # a step of the codec shall not take longer
_MAX_OPEN_UTTERANCES = 4096  # not spoken yet, of one request


class Decoded(Protocol):
    """A piece that the codec made: pcm [n] fp32, `done` with the last piece of an utterance."""

    @property
    def id(self) -> str: ...
    @property
    def pcm(self) -> Any: ...
    @property
    def done(self) -> bool: ...


class Codec(Protocol):
    """What the voice asks of a codec engine (codec_engine.py). Frames are [T, K] ids, in the order of SpeechFormat.frames."""

    def open(self, id: str, seed: int = 0) -> None: ...
    def push(self, id: str, frames: Any, last: bool) -> None: ...
    def step(self, ids: Sequence[str] | None = None) -> Sequence[Decoded]: ...
    def close(self, id: str) -> None: ...


@dataclass(kw_only=True)
class _Counters:
    num_requests: int = 0
    num_steps: int = 0
    num_codec_steps: int = 0
    num_codec_streams: int = 0  # summed over codec steps
    num_frames: int = 0
    num_underruns: int = 0
    num_cut: int = 0
    audio_s: float = 0.0
    underrun_s: float = 0.0


class SpeechEngine:
    """One voice. `first_frames` are the fewest that the codec makes sound of, for it looks ahead."""

    kind = "tts"

    def __init__(
        self,
        *,
        info: ModelInfo,
        lm: LLMEngine,
        codec: Codec,
        format: SpeechFormat,
        clock: Callable[[], float],
        max_streams: int = 64,
        first_frames: int = 3,
        input_timeout_s: float = 300.0,
        seed: int = 0,
    ) -> None:
        self.info = info
        self.lm = lm
        self.codec = codec
        self.format = format
        self.max_streams = max_streams
        self.last_error: BaseException | None = None
        self.counters = _Counters()
        self._clock = clock
        self._first_frames = first_frames
        self._input_timeout_s = input_timeout_s
        self._seed = seed
        self._masks = [phase_mask(phase) for phase in format.phases]
        self._requests: dict[str, Speaking] = {}
        self._queue: list[Speaking] = []  # with something to say and no stream of the codec yet, by (priority, order)
        self._admitted: dict[str, Speaking] = {}
        self._by_lm: dict[str, Speaking] = {}  # LM request id -> whose it is
        self._over: list[Speaking] = []  # closed, with nothing left to say
        self._told: list[AnyEvent] = []  # for the next step to give
        self._first_audio = [0] * (len(FIRST_AUDIO_BUCKETS) + 1)
        self._first_audio_s = 0.0
        self._frame_cost_s = 0.0  # of a codec step, per frame
        self._token_cost_s = 0.0  # of a step of the LM

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, request: AnyRequest) -> None:
        """Start speaking. Raises InvalidRequest (or a kind of it) when it can never work; nothing is kept then."""
        if not isinstance(request, SpeechRequest):
            raise InvalidRequest(f"model {self.info.model!r} is a voice and takes speech requests", param="model")
        if request.request_id in self._requests:
            raise DuplicateRequest("request_id: this id is already running", param="request_id")
        if not request.utterances and not request.open:
            raise InvalidRequest("input: expected something to speak, got none", param="input")
        if request.params is not None:
            check_params(request.params, self.info.vocab_size)
        if len(request.utterances) > _MAX_OPEN_UTTERANCES:
            raise InvalidRequest(f"input: {len(request.utterances)} utterances are too many at once", param="input")
        for prompt in request.utterances:
            self._check(prompt)
        now = self._clock()
        self.counters.num_requests += 1
        asked = request.params.seed if request.params is not None else None
        goal = FIRST_AUDIO_S if request.deadline is None else request.deadline
        speaking = Speaking(
            request=request,
            format=self.format,
            order=self.counters.num_requests,
            seed=mixed_seed(self._seed, self.counters.num_requests) if asked is None else asked,
            arrival=now,
            closed=not request.open,
            input_since=now,
            since=now,
            due=now + goal,
        )
        self._requests[request.request_id] = speaking
        for prompt in request.utterances:
            speaking.add(prompt)
        self._admit(speaking)

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
        if token_ids:
            self._check(token_ids)
            if len(speaking.utterances) >= _MAX_OPEN_UTTERANCES:
                raise InvalidRequest(f"append: {_MAX_OPEN_UTTERANCES} utterances wait already", param="token_ids")
        now = self._clock()
        speaking.input_since = now
        speaking.closed = last
        if token_ids:
            if not speaking.utterances:
                deadline = speaking.request.deadline
                speaking.want(now, FIRST_AUDIO_S if deadline is None else deadline)
            speaking.add(token_ids)
        self._admit(speaking)

    def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None:
        """A new priority, or a new goal for the first audio in seconds from submit. Unknown ids may just have ended."""
        speaking = self._requests.get(request_id)
        if speaking is None:
            return
        if priority is not None:
            speaking.request.priority = priority
            self._queue.sort(key=_key)
            if speaking.lm_id:
                self.lm.update(speaking.lm_id, priority=priority)
        if deadline is not None:
            speaking.request.deadline = deadline
            if speaking.started is None:
                speaking.due = speaking.since + deadline

    def abort(self, request_id: str, reason: str) -> list[AnyEvent]:
        """End a request now, in whatever state; nothing when it has already ended."""
        speaking = self._requests.get(request_id)
        if speaking is None:
            return []
        return self._end(speaking, Aborted(request_id=request_id, reason=reason, usage=speaking.usage()))

    # ------------------------------------------------------------------------------------------- for the arbiter

    def has_work(self) -> bool:
        if self._over or self._told or self.lm.has_work():
            return True
        return any(one.utterances[0].generated for one in self._admitted.values())

    def num_requests(self) -> int:
        return len(self._requests)

    def next_deadline(self) -> float | None:
        """The earliest time at which a listener must get more, on this engine's clock."""
        due = [
            one.due if one.started is None else one.runs_out() - _MARGIN_S - self._token_cost_s * one.tokens_to_audio()
            for one in self._admitted.values()
        ]
        due += [one.due for one in self._queue]
        return min(due, default=None)

    def best_priority(self) -> int:
        return min((speaking.request.priority for speaking in self._requests.values()), default=0)

    def next_timer(self) -> float | None:
        return min((one.input_since + self._input_timeout_s for one in self._starving()), default=None)

    # ---------------------------------------------------------------------------------------------------- steps

    def step(self, slack_s: float | None = None) -> list[AnyEvent]:
        """One piece of work: the codec where audio is due, else the LM. `slack_s` bounds it."""
        now = self._clock()
        self.counters.num_steps += 1
        events, self._told = self._told, []
        for starving in self._starving():
            if now - starving.input_since >= self._input_timeout_s:
                events += self.abort(starving.request_id, "input_timeout")
        over, self._over = self._over, []
        for speaking in over:
            if self._requests.get(speaking.request_id) is speaking:
                events += self._finish(speaking, now)
        due = self._due(now)
        if due:
            return events + self._decode(due, slack_s)
        told = self._step_lm(now, slack_s)
        if told:
            cost = self._clock() - now
            self._token_cost_s = 0.9 * (self._token_cost_s or cost) + 0.1 * cost
        for event in told:
            events += self._said(event)
        return events

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; counters only grow. Tokens and blocks are the LM's."""
        c = self.counters
        buckets, total = [], 0
        for le, count in zip([*FIRST_AUDIO_BUCKETS, None], self._first_audio, strict=True):
            total += count
            buckets.append([le, total])
        return self.lm.stats() | {
            "running": len(self._admitted),
            "waiting": len(self._queue),
            "waiting_for_input": sum(not one.utterances for one in self._requests.values()),
            "requests": len(self._requests),
            "active_streams": len(self._admitted),
            "max_streams": self.max_streams,
            "speech_seconds": c.audio_s,
            "underruns": c.num_underruns,
            "underrun_seconds": c.underrun_s,
            "cut_utterances": c.num_cut,
            "codec_steps": c.num_codec_steps,
            "codec_streams": c.num_codec_streams,
            "codec_frames": c.num_frames,
            "first_audio": {"buckets": buckets, "sum": self._first_audio_s},
        }

    def forget_counts(self) -> None:
        """Begin counting anew: what was spoken so far was a rehearsal."""
        self.counters = _Counters()
        self.lm.scheduler.counters = Counters()
        self._first_audio = [0] * len(self._first_audio)
        self._first_audio_s = self._frame_cost_s = self._token_cost_s = 0.0

    def close(self) -> None:
        for speaking in list(self._requests.values()):
            self._forget(speaking)
        self.lm.close()

    # ------------------------------------------------------------------------------------------------ who speaks

    def _check(self, prompt: Sequence[int]) -> None:
        info = self.info
        if not prompt:
            raise InvalidRequest("input: expected ids in every utterance, got none", param="input")
        if not (0 <= min(prompt) and max(prompt) < info.vocab_size):
            raise InvalidRequest(f"input: expected token ids in [0, {info.vocab_size})", param="input")
        # The prompt of the last phase is the longest: it has what the earlier phases said, and a second to speak.
        phases = range(len(self.format.phases) - 1)
        need = len(prompt) + sum(self.format.max_tokens(prompt, phase) + 1 for phase in phases)
        need += int(self.format.tokens_per_s)
        room = min(info.max_model_len, self.lm.scheduler.longest())
        if need > room:
            raise ContextLengthExceeded(
                f"input: an utterance of {len(prompt)} ids needs {need} positions, this voice has {room}", param="input"
            )

    def _admit(self, speaking: Speaking | None = None) -> None:
        """Line up what has something to say; give free streams to those who wait."""
        if speaking is not None:
            if speaking.closed and not speaking.utterances:
                self._over.append(speaking)
            elif speaking.admitted:
                self._told += self._guarded([speaking], lambda: self._generate(speaking))
            elif speaking.utterances and speaking not in self._queue:
                bisect.insort(self._queue, speaking, key=_key)
        while self._queue and len(self._admitted) < self.max_streams:
            one = self._queue.pop(0)
            one.admitted = True
            if one.first_scheduled is None:
                one.first_scheduled = self._clock()
            self._admitted[one.request_id] = one
            self._told += self._guarded([one], lambda one=one: self._generate(one))  # type: ignore[misc]

    def _starving(self) -> list[Speaking]:
        return [one for one in self._requests.values() if not one.closed and not one.utterances]

    def _step_lm(self, now: float, slack_s: float | None) -> list[AnyEvent]:
        """A step of the LM. While somebody is near running out, those who have plenty to play get no tokens."""
        if not self.lm.has_work():
            return []
        leads = {lm_id: one.lead(now) for lm_id, one in self._by_lm.items()}
        near = min(leads.values(), default=0.0) < _NEAR_S
        held = [lm_id for lm_id, lead in leads.items() if near and lead > _FAR_S]
        if not held:
            return self.lm.step(slack_s)
        num_steps = self.lm.scheduler.counters.num_steps
        for lm_id in held:
            self.lm.hold(lm_id, True)
        events = self.lm.step(slack_s)
        for lm_id in held:
            self.lm.hold(lm_id, False)
        if not events and self.lm.scheduler.counters.num_steps == num_steps:  # they hold what the others wait for
            events = self.lm.step(slack_s)
        return events

    # ------------------------------------------------------------------------------------------------ the LM

    def _generate(self, speaking: Speaking) -> list[AnyEvent]:
        """Give the LM the next phase of the next utterance, unless it is at one already."""
        utterance = speaking.to_generate
        if speaking.lm_id or utterance is None:
            return []
        index = len(utterance.outputs)
        phase = self.format.phases[index]
        ids = self.format.phase_prompt(utterance.prompt, utterance.outputs)
        limit = self.format.max_tokens(utterance.prompt, index)
        room = min(self.info.max_model_len, self.lm.scheduler.longest())
        if speaking.carried and len(speaking.carried) + len(ids) + limit <= room:
            ids = [*speaking.carried, *ids]
        max_tokens = min(limit, room - len(ids))
        seed = mixed_seed(speaking.seed, utterance.number, index)
        lm_id = f"{speaking.request_id}/{utterance.number}.{index}"
        self.lm.submit(
            Request(
                request_id=lm_id,
                model=self.lm.info.model,
                prompt=ids,
                params=phase_params(
                    phase, self._masks[index], speaking.request.params, max_tokens=max_tokens, seed=seed
                ),
                priority=speaking.request.priority,
                cache_salt=speaking.request.cache_salt,
            )
        )
        utterance.outputs.append([])
        speaking.lm_id = lm_id
        self._by_lm[lm_id] = speaking
        return []

    def _said(self, event: AnyEvent) -> list[AnyEvent]:
        """The LM said something of an utterance."""
        speaking = self._by_lm.get(event.request_id)
        if speaking is None:
            return []
        utterance = speaking.to_generate
        assert utterance is not None
        match event:
            case Tokens():
                utterance.outputs[-1] += event.token_ids
                speaking.num_output_tokens += len(event.token_ids)
            case Done():
                del self._by_lm[event.request_id]
                speaking.lm_id = ""
                if len(utterance.outputs) == 1:
                    speaking.num_cached_tokens += event.usage.num_cached_tokens
                if event.finish_reason == "length":
                    self.counters.num_cut += not utterance.cut
                    utterance.cut = speaking.was_cut = True
                if len(utterance.outputs) == len(self.format.phases):
                    utterance.generated = True
                    speaking.carry(utterance)
                return self._guarded([speaking], lambda: self._generate(speaking))
            case Failed():
                del self._by_lm[event.request_id]
                speaking.lm_id = ""
                return self._end(speaking, Failed(request_id=speaking.request_id, error=event.error))
            case _:
                del self._by_lm[event.request_id]
                speaking.lm_id = ""
                return self._end(speaking, Aborted(request_id=speaking.request_id, reason="internal"))
        return []

    # ---------------------------------------------------------------------------------------------- the codec

    def _due(self, now: float) -> list[Speaking]:
        """Whose frames shall become audio now, most urgent first; behind them who would be due soon, for company is cheap."""
        due: list[Speaking] = []
        soon: list[Speaking] = []
        for speaking in self._admitted.values():
            utterance = speaking.utterances[0]
            num_ready = speaking.num_ready(utterance)
            enough = speaking.chunk(now, self._first_frames, _MOST_FRAMES)
            if utterance.generated or num_ready >= enough:
                due.append(speaking)
            elif 2 * num_ready >= enough and utterance.num_pushed:
                soon.append(speaking)
        if not due:
            return []
        return sorted(due, key=_by_clock) + sorted(soon, key=_by_clock)

    def _decode(self, due: list[Speaking], slack_s: float | None) -> list[AnyEvent]:
        """One step of the codec over as many of those due as the time allows, at least one."""
        started = self._clock()
        budget_s = _CODEC_S if slack_s is None else min(_CODEC_S, slack_s)
        left = max(4, int(budget_s / self._frame_cost_s)) if self._frame_cost_s else 4 * _MOST_FRAMES
        mine: list[Speaking] = []
        num_frames = 0
        for speaking in due:
            if left <= 0:
                break
            count = min(left, _MOST_FRAMES, speaking.num_ready(speaking.utterances[0]))
            left -= max(1, count)
            num_frames += count
            mine.append(speaking)
            events = self._guarded([speaking], lambda speaking=speaking, count=count: self._push(speaking, count))  # type: ignore[misc]
            if events:
                return events
        events = self._guarded(mine, lambda: self._land(self.codec.step([one.request_id for one in mine])))
        ended = self._clock()
        self.counters.num_codec_steps += 1
        self.counters.num_codec_streams += len(mine)
        self.counters.num_frames += num_frames
        if num_frames:
            cost = (ended - started) / num_frames
            self._frame_cost_s = 0.8 * (self._frame_cost_s or cost) + 0.2 * cost
        return events

    def _push(self, speaking: Speaking, count: int) -> list[AnyEvent]:
        utterance = speaking.utterances[0]
        if not speaking.codec_open:
            self.codec.open(speaking.request_id, mixed_seed(speaking.seed, utterance.number, 99))
            speaking.codec_open = True
        places = self.format.num_places
        first = utterance.num_pushed
        codes = self.format.frames(speaking.codes(utterance)[first * places : (first + count) * places])
        utterance.num_pushed += count
        last = utterance.generated and speaking.num_ready(utterance) == 0
        self.codec.push(speaking.request_id, codes, last)
        return []

    def _land(self, pieces: Sequence[Decoded]) -> list[AnyEvent]:
        now = self._clock()
        events: list[AnyEvent] = []
        for piece in pieces:
            speaking = self._admitted[piece.id]
            utterance = speaking.utterances[0]
            pcm: NDArray[np.float32] = np.asarray(piece.pcm, np.float32)
            if not np.isfinite(pcm).all():
                raise InternalError("the codec computed no audio for these codes", code="nan_audio")
            if self.format.trim_below > 0:
                if utterance.trimmer is None:
                    utterance.trimmer = SilenceTrimmer(self.format.trim_below, sample_rate=self.format.sample_rate)
                pcm = utterance.trimmer.push(pcm, last=piece.done)
            if len(pcm):
                self._note_sent(speaking, len(pcm) / self.format.sample_rate, now)
            if len(pcm) or piece.done:
                data = (pcm.clip(-1.0, 1.0) * 32767.0).round().astype("<i2").tobytes()
                audio = Audio(request_id=piece.id, pcm=data, utterance=utterance.number, last=piece.done)
                events.append(speaking.stamp(audio))
            if piece.done:
                events += self._spoken(speaking, now)
        return events

    def _note_sent(self, speaking: Speaking, seconds: float, now: float) -> None:
        if speaking.started is None:
            wait = now - speaking.since
            self._first_audio[bisect.bisect_left(FIRST_AUDIO_BUCKETS, wait)] += 1
            self._first_audio_s += wait
            speaking.first_audio = speaking.first_audio or now
        late = speaking.send(seconds, now)
        self.counters.num_underruns += late > 0
        self.counters.underrun_s += late
        self.counters.audio_s += seconds

    def _spoken(self, speaking: Speaking, now: float) -> list[AnyEvent]:
        """The first utterance is over: the next one, a pause, or the end."""
        speaking.utterances.popleft()
        self.codec.close(speaking.request_id)
        speaking.codec_open = False
        if speaking.utterances:
            return []
        self._leave(speaking)
        speaking.input_since = max(speaking.input_since, now)
        events = self._finish(speaking, now) if speaking.closed else []
        self._admit()
        return events

    # ------------------------------------------------------------------------------------------------ endings

    def _guarded(self, mine: Sequence[Speaking], work: Callable[[], list[AnyEvent]]) -> list[AnyEvent]:
        """What the work tells; an error in it ends only the requests it was for."""
        try:
            return work()
        except Exception as error:
            self.last_error = error
            info = to_info(error)
            return [event for one in mine for event in self._end(one, Failed(request_id=one.request_id, error=info))]

    def _finish(self, speaking: Speaking, now: float) -> list[AnyEvent]:
        timing = Timing(
            queue_s=(speaking.first_scheduled or now) - speaking.arrival,
            first_token_s=(speaking.first_audio or now) - speaking.arrival,
            total_s=now - speaking.arrival,
        )
        done = Done(
            request_id=speaking.request_id,
            finish_reason="length" if speaking.was_cut else "stop",
            usage=speaking.usage(),
            timing=timing,
            audio_s=speaking.total_s,
        )
        return self._end(speaking, done)

    def _end(self, speaking: Speaking, event: AnyEvent) -> list[AnyEvent]:
        if self._requests.get(speaking.request_id) is not speaking:
            return []
        self._forget(speaking)
        self._admit()
        return [speaking.stamp(event)]

    def _forget(self, speaking: Speaking) -> None:
        """Free everything it held."""
        self._requests.pop(speaking.request_id, None)
        if speaking in self._queue:
            self._queue.remove(speaking)
        self._leave(speaking)

    def _leave(self, speaking: Speaking) -> None:
        """Give back the stream of the codec, and the LM's sequence with its blocks."""
        self._admitted.pop(speaking.request_id, None)
        speaking.admitted = False
        if speaking.lm_id:
            self._by_lm.pop(speaking.lm_id, None)
            self.lm.abort(speaking.lm_id, "client")
            speaking.lm_id = ""
        if speaking.codec_open:
            speaking.codec_open = False
            self.codec.close(speaking.request_id)


def _key(speaking: Speaking) -> tuple[int, int]:
    return speaking.sort_key


def _by_clock(speaking: Speaking) -> tuple[float, int]:
    return (speaking.runs_out(), speaking.order)


def mixed_seed(*parts: int) -> int:
    """A seed made of numbers."""
    data = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1

"""The recogniser: audio requests in, transcripts out, one bounded piece of work at a time.

A step hears what live streams brought (one batch over all of them), then does one more thing: hear a block of a file or tell
its speakers apart, encode windows, or decode one token of every running window. Windows of all requests share one batch
(segment_decoder.py). Not thread-safe: the host's loop is the only caller.

Backpressure: a live stream that is more than `max_behind_s` ahead of what has been told fails with code "too_fast".
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .asr_options import check_options
from .decode_job import DecodeJob, DecodeOptions, Finished
from .early_text import EarlyText, final_options
from .errors import DuplicateRequest, InvalidRequest, Overloaded, to_info
from .language_choice import LanguageChoice
from .listeners import FileListening, Labelling, Listening, LiveListening, LookAhead, common, open_live
from .recording import SAMPLE_RATE, Recording
from .segment_decoder import SegmentDecoder
from .segmenter import Boundary
from .transcript import PlacedSegment, Span
from .types import (
    Aborted,
    AnyEvent,
    AnyRequest,
    AudioRequest,
    EmbeddingSpan,
    Failed,
    ModelInfo,
    Recognized,
    Segment,
    Speech,
    TranscribeOptions,
)

_MAX_WINDOWS = 64  # of one stream, heard in one step: 2 s
_FINAL_DUE_S = 0.25  # after the end of speech somebody waits for the text
_HEAR_DUE_S = 0.1  # after audio came, somebody waits to be heard
_MAX_LOOKS = 4  # windows asked for their language

ReadSamples = Callable[[int, int], Any]  # (start, end) -> fp32 [end - start]
Diarize = Callable[[ReadSamples, list[Segment], TranscribeOptions], Labelling]


class ASREngine:
    """One recogniser. `model` is a Whisper, `vad` a SileroVAD, `streams` the detector's states of live streams."""

    kind = "asr"

    def __init__(
        self,
        *,
        info: ModelInfo,
        model: Any,
        vad: Any,
        streams: Any,
        clock: Callable[[], float],
        num_slots: int,
        num_audio: int = 0,
        encoder_batch: int = 1,
        max_behind_s: float = 120.0,
        input_timeout_s: float = 300.0,
        seed: int = 0,
        diarize: Diarize | None = None,
    ) -> None:
        self.info = info
        self.model = model
        self.decoder = SegmentDecoder(model, num_slots=num_slots, num_audio=num_audio, encoder_batch=encoder_batch)
        self.last_error: BaseException | None = None
        self._early = EarlyText(self.decoder, self._job, clock)
        self._decided: deque[Finished] = deque()  # final text that was there when speech ended
        self._vad = vad
        self._streams = streams
        self._free_streams = list(range(streams.num))
        self._clock = clock
        self._max_behind = round(max_behind_s * SAMPLE_RATE)
        self._max_in_decoder = num_slots + encoder_batch
        self._input_timeout_s = input_timeout_s
        self._seed = seed
        self._diarize = diarize
        self._requests: dict[str, Listening] = {}
        self._files: deque[FileListening] = deque()  # with work outside of the decoder: to be heard, or labelled
        self._file_next = True
        self._counters = dict.fromkeys(("requests", "steps", "heard_samples", "told_segments"), 0)
        self._seconds_per_window = 0.0

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, request: AnyRequest) -> None:
        """Start listening. Raises InvalidRequest when it can never work, Overloaded when too many streams are open."""
        if not isinstance(request, AudioRequest):
            raise InvalidRequest(f"model {self.info.model!r} hears audio and takes no text requests", param="model")
        if request.request_id in self._requests:
            raise DuplicateRequest("request_id: this id is already running", param="request_id")
        if request.open and request.in_pieces:
            raise InvalidRequest("in_pieces: expected of files, a live stream is open anyway", param="in_pieces")
        options = request.options
        check_options(options, model=self.model, num_slots=self.decoder.num_slots, live=request.open)
        if options.diarize and self._diarize is None:
            raise InvalidRequest("diarize: telling speakers apart is not available here", param="diarize")
        recording = Recording(request.encoding)
        recording.append(request.pcm)
        if request.open and recording.num_samples > self._max_behind:
            raise self._too_fast()
        if request.open and not self._free_streams:
            raise Overloaded(f"{self._streams.num} live streams are open already", retry_after_s=5.0)
        # The recording holds the audio; a file's is let go of as soon as the request ends.
        listening = self._listen(msgspec.structs.replace(request, pcm=b""), recording)
        self._requests[request.request_id] = listening
        self._counters["requests"] += 1
        if isinstance(listening, FileListening):
            self._line_up(listening)

    def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        """More audio of a live stream, or of a file in pieces. Raises InvalidRequest when it takes none, or when a stream gets it
        faster than it can be heard."""
        listening = self._requests.get(request_id)
        if token_ids or embeddings:
            raise InvalidRequest("append: a recogniser takes audio, not token ids", param="token_ids")
        if listening is None or listening.closed:
            raise InvalidRequest("append: this request is unknown or takes no more audio", param="request_id")
        listening.recording.append(pcm)
        listening.input_since = self._clock()
        listening.closed = last
        if isinstance(listening, FileListening):
            self._line_up(listening)
        elif isinstance(listening, LiveListening) and listening.behind > self._max_behind:
            raise self._too_fast()

    def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None:
        """A new priority or deadline, for windows that are queued from now on. Unknown ids may just have ended."""
        listening = self._requests.get(request_id)
        if listening is None:
            return
        if priority is not None:
            listening.request.priority = priority
        if deadline is not None:
            listening.request.deadline = deadline

    def abort(self, request_id: str, reason: str) -> list[AnyEvent]:
        """End a request now, in whatever state; nothing when it has already ended."""
        listening = self._requests.get(request_id)
        if listening is None:
            return []
        self._forget(listening)
        return [listening.stamp(Aborted(request_id=request_id, reason=reason, usage=listening.usage()))]

    # ------------------------------------------------------------------------------------------- for the arbiter

    def has_work(self) -> bool:
        return (
            bool(self._files)
            or self.decoder.has_work()
            or any(live.num_windows or live.wants_flush for live in self._live())
        )

    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def can_diarize(self) -> bool:
        return self._diarize is not None

    def next_deadline(self) -> float | None:
        """When somebody is due to be heard, or to get the text of what was said, on this engine's clock."""
        due = [job for job in (self.decoder.earliest_due(),) if job < math.inf]
        due += [live.input_since + _HEAR_DUE_S for live in self._live() if live.num_windows or live.wants_flush]
        return min(due, default=None)

    def best_priority(self) -> int:
        return min((listening.request.priority for listening in self._requests.values()), default=0)

    def next_timer(self) -> float | None:
        waiting = [one.input_since + self._input_timeout_s for one in self._requests.values() if not one.closed]
        return min(waiting, default=None)

    # ---------------------------------------------------------------------------------------------------- steps

    def step(self, slack_s: float | None = None) -> list[AnyEvent]:
        """One bounded piece of work. `slack_s` bounds the windows encoded at once."""
        now = self._clock()
        self._counters["steps"] += 1
        events = self._end_starved(now)
        events += self._guarded(self._live(), lambda: self._hear(now))
        while self._decided:
            events += self._land(self._decided.popleft())
        if self._files and (self._file_next or not self.decoder.has_work()):
            self._file_next = False
            file = self._files.popleft()
            events += self._guarded([file], lambda: self._advance(file))
        elif self.decoder.has_work():
            self._file_next = True
            self._count_started(now)
            for finished in self.decoder.step(max_windows=self._windows_within(slack_s)):
                events += self._land(finished)
        for listening in list(self._requests.values()):
            events += self._feed(listening)
        self._early.next_partial(self._live())
        return events

    def _guarded(self, mine: Sequence[Listening], work: Callable[[], list[AnyEvent]]) -> list[AnyEvent]:
        """What the work tells; an error in it ends only the requests it was for."""
        try:
            return work()
        except Exception as error:
            self.last_error = error
            return [event for listening in mine for event in self._fail(listening, error)]

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; counters only grow."""
        counters = self.decoder.counters
        free_text, free_audio = self.decoder.num_free
        live = self._live()
        return {
            "running": self.decoder.num_running,
            "waiting": self.decoder.num_waiting + len(self._files) + sum(len(r.to_decode) for r in self._all()),
            "waiting_for_input": sum(not listening.closed for listening in self._all()),
            "requests": len(self._requests),
            "active_streams": len(live),
            "free_slots": free_text,
            "free_audio_slots": free_audio,
            "kv_usage": 1.0 - free_text / self.decoder.num_slots,
            "prompt_tokens": self.decoder.num_tokens[0],
            "generation_tokens": self.decoder.num_tokens[1],
            "windows": counters["windows"],
            "fallbacks": counters["fallbacks"],
            "steps": self._counters["steps"],
            "decode_steps": counters["decode_steps"],
            "segments": self._counters["told_segments"],
            "audio_seconds": self._counters["heard_samples"] / SAMPLE_RATE,
            "audio_bytes": sum(listening.recording.num_bytes for listening in self._all()),
        }

    def close(self) -> None:
        for listening in self._all():
            self._forget(listening)

    # ------------------------------------------------------------------------------------------------ listening

    def _all(self) -> list[Listening]:
        return list(self._requests.values())

    def _live(self) -> list[LiveListening]:
        return [listening for listening in self._requests.values() if isinstance(listening, LiveListening)]

    def _listen(self, request: AudioRequest, recording: Recording) -> Listening:
        now = self._clock()
        if not request.open:
            return FileListening(**common(request, recording, self.model, now), closed=not request.in_pieces)
        slot = self._free_streams.pop()
        self._streams.reset(slot)
        return open_live(request, recording, self.model, now, slot=slot)

    def _forget(self, listening: Listening) -> None:
        """Free everything it held."""
        self._requests.pop(listening.request.request_id, None)
        self.decoder.drop(listening)
        if isinstance(listening, LiveListening):
            self._early.forget(listening)
            self._free_streams.append(listening.slot)
        elif isinstance(listening, FileListening) and listening in self._files:
            self._files.remove(listening)

    def _line_up(self, file: FileListening) -> None:
        if (file.labelling is not None or file.can_scan) and file not in self._files:
            self._files.append(file)  # files take turns

    def _advance(self, file: FileListening) -> list[AnyEvent]:
        """The next piece of a file's work outside of the decoder."""
        if file.labelling is None:
            return self._scan(file)
        labelled = file.labelling.step()
        if labelled is None:
            self._line_up(file)
            return []
        return [self._recognized(file, labelled, file.settled), *self._end(file)]

    def _scan(self, file: FileListening) -> list[AnyEvent]:
        before = len(file.probs)
        file.scan(self._vad)
        if not file.scanned:
            self._line_up(file)
            self._counters["heard_samples"] += (len(file.probs) - before) * 512
            return []
        self._counters["heard_samples"] += file.recording.num_samples - before * 512
        if file.language.code is None:
            file.language = LanguageChoice(max_looks=min(_MAX_LOOKS, max(1, len(file.to_decode))))
        return self._end_if_finished(file)

    def _hear(self, now: float) -> list[AnyEvent]:
        """Let the detector hear what live streams brought; open and close their segments."""
        streams = [live for live in self._live() if live.num_windows or live.wants_flush]
        hearing = [live for live in streams if live.num_windows]
        pieces = [live.windows(_MAX_WINDOWS) for live in hearing]
        asked = [at for at, live in enumerate(hearing) if live.request.options.vad]
        answers = self._streams.run([hearing[at].slot for at in asked], [pieces[at] for at in asked])
        probs = dict(zip(asked, answers, strict=True))
        events: list[AnyEvent] = []
        for at, live in enumerate(hearing):
            self._counters["heard_samples"] += len(pieces[at])
            for prob in probs.get(at) or [1.0] * (len(pieces[at]) // 512):
                live.note(prob)
                for boundary in live.segmenter.push(prob):
                    events += self._bound(live, boundary, now)
        for live in streams:
            if live.wants_flush:
                live.flushed = True
                for boundary in live.segmenter.finish(live.recording.num_samples):
                    events += self._bound(live, boundary, now)
                events += self._end_if_finished(live)
            self._early.look_ahead(live)
            live.forget()
        return events

    def _bound(self, live: LiveListening, boundary: Boundary, now: float) -> list[AnyEvent]:
        request_id = live.request.request_id
        if boundary.what == "started":
            live.open_start, live.open_overlap = boundary.sample, boundary.overlap
            self._early.started(live, boundary.sample)
            if boundary.overlap and live.to_decode:
                live.to_decode[-1].forced_cut = True
        else:
            assert live.open_start is not None
            end = min(boundary.sample, live.recording.num_samples)
            span = Span(
                start=live.open_start,
                end=end,
                speech=live.spoken(live.open_start, end),
                overlap=live.open_overlap,
            )
            live.open_start = None
            live.transcript.add(span)
            self._decode_final(live, span, now)
            self._early.stopped(live)
        if boundary.cut:
            return []  # speech goes on; only we needed a cut
        settled = live.settled / SAMPLE_RATE
        return [live.stamp(Speech(request_id=request_id, what=boundary.what, sample=boundary.sample, upto=settled))]

    def _decode_final(self, live: LiveListening, span: Span, now: float) -> None:
        """A segment has ended: queue it, unless its text is on its way or there already."""
        ahead = self._early.take(live, span)
        if ahead is None:
            live.to_decode.append(span)
            return
        assert ahead.job is not None
        live.num_in_decoder += 1
        live.language, ahead.job.tag = ahead.job.language, (live, span)
        self.decoder.adopt(ahead.job, live, now + _FINAL_DUE_S)
        if ahead.finished is not None:
            self._decided.append(ahead.finished)

    def _end_starved(self, now: float) -> list[AnyEvent]:
        late = [
            request_id
            for request_id, listening in self._requests.items()
            if not listening.closed and now - listening.input_since >= self._input_timeout_s
        ]
        return [event for request_id in late for event in self.abort(request_id, "input_timeout")]

    # ------------------------------------------------------------------------------------------------- decoding

    def _feed(self, listening: Listening) -> list[AnyEvent]:
        """Queue what may be decoded: of a file a bounded number of windows, so that others get their turn."""
        while listening.to_decode and (listening.live or listening.num_in_decoder < self._max_in_decoder):
            self._queue(listening, listening.to_decode.popleft())
        return []

    def _queue(self, listening: Listening, span: Span) -> None:
        if listening.live and not listening.language.sure:
            listening.language = _again(listening.language)
        listening.num_in_decoder += 1
        job = self._job(listening, span, final_options(listening.options, span), listening)
        if isinstance(listening, LiveListening):
            job.draft = listening.partial.ids
        self.decoder.add(job)

    def _job(self, listening: Listening, span: Span, options: DecodeOptions, owner: object) -> DecodeJob:
        recording, start, end = listening.recording, span.seek, span.window_end
        deadline = listening.request.deadline
        due = math.inf if deadline is None else listening.arrival + deadline
        if listening.live:
            due = min(due, self._clock() + _FINAL_DUE_S)
        return DecodeJob(
            owner=owner,
            tag=(listening, span),
            load=lambda: recording.slice(start, end),
            num_samples=end - start,
            options=options,
            language=listening.language,
            seed=(self._seed + listening.request.options.seed) * 1_000_003 + start,
            priority=listening.request.priority,
            due=due,
        )

    def _land(self, finished: Finished) -> list[AnyEvent]:
        """A window is done: read it, decode what is left of its span, tell what can be told."""
        listening: Listening
        listening, span = finished.job.tag
        if self._requests.get(listening.request.request_id) is not listening:
            return []
        if finished.error is not None:
            self.last_error = finished.error
            return self._fail(listening, finished.error)
        return self._guarded([listening], lambda: self._read(listening, span, finished))

    def _read(self, listening: Listening, span: Span, finished: Finished) -> list[AnyEvent]:
        job, decoded = finished.job, finished.result
        assert decoded is not None
        if isinstance(listening, LiveListening) and isinstance(job.owner, LookAhead):
            return self._early.land_ahead(listening, finished)
        listening.num_prompt_tokens += len(job.options.prompt)
        listening.num_output_tokens += len(decoded.ids)
        code = job.language.code or ""
        if isinstance(listening, LiveListening) and job.owner is listening.partial:
            return self._early.land_partial(listening, span, finished)
        listening.num_in_decoder -= 1
        listening.told_language = job.language
        if not job.options.timestamps and len(decoded.ids) >= job.options.max_tokens:
            # Too much was said for one window: with timestamps we know where to go on.
            listening.num_in_decoder += 1
            self.decoder.add(self._job(listening, span, dataclasses.replace(job.options, timestamps=True), listening))
            return []
        reader = listening.reader
        if job.options.timestamps != reader.timestamps:
            reader = dataclasses.replace(reader, timestamps=job.options.timestamps)
        reader.read(span, decoded, code)
        if not span.done:
            self._queue(listening, span)
        leaving = listening.transcript.take()
        settled = [span.start for span, _ in leaving[1:]] + [listening.settled]
        events: list[AnyEvent] = []
        for (told, placed), upto in zip(leaving, settled, strict=False):
            events += self._tell(listening, told, placed, upto)
        return events + self._end_if_finished(listening)

    # -------------------------------------------------------------------------------------------------- telling

    def _tell(self, listening: Listening, span: Span, placed: list[PlacedSegment], upto: int) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        if isinstance(listening, LiveListening) and listening.request.options.partial_s:
            events += self._early.settle(listening, span, placed)
        listening.forget()
        segments = [item.segment for item in placed]
        self._counters["told_segments"] += len(segments)
        if isinstance(listening, FileListening) and listening.request.options.diarize:
            listening.kept += segments
            return events
        if segments or (listening.live and span.done):  # a stream hears of a segment without words too
            events.append(self._recognized(listening, segments, upto))
        return events

    def _recognized(self, listening: Listening, segments: list[Segment], upto: int) -> AnyEvent:
        if listening.first_result is None:
            listening.first_result = self._clock()
        choice = listening.told_language or listening.language
        return listening.stamp(
            Recognized(
                request_id=listening.request.request_id,
                segments=segments,
                language=choice.code or "",
                language_probability=choice.probability,
                upto=upto / SAMPLE_RATE,
            ),
        )

    def _end_if_finished(self, listening: Listening) -> list[AnyEvent]:
        if not listening.finished():
            return []
        if isinstance(listening, FileListening) and listening.kept:
            assert self._diarize is not None
            listening.labelling = self._diarize(listening.recording.slice, listening.kept, listening.request.options)
            self._line_up(listening)
            return []
        return self._end(listening)

    def _end(self, listening: Listening) -> list[AnyEvent]:
        done = listening.stamp(listening.done(self._clock()))
        self._forget(listening)
        return [done]

    def _fail(self, listening: Listening, error: Exception) -> list[AnyEvent]:
        request_id = listening.request.request_id
        if self._requests.get(request_id) is not listening:
            return []
        self._forget(listening)
        return [listening.stamp(Failed(request_id=request_id, error=to_info(error)))]

    # --------------------------------------------------------------------------------------------------- inside

    def _too_fast(self) -> InvalidRequest:
        return InvalidRequest(
            f"audio comes faster than it can be heard: more than {self._max_behind / SAMPLE_RATE:.0f} s are waiting",
            param="pcm",
            code="too_fast",
        )

    def _count_started(self, now: float) -> None:
        for listening in self._requests.values():
            if listening.first_started is None and listening.num_in_decoder:
                listening.first_started = now

    def _windows_within(self, slack_s: float | None) -> int | None:
        return None if slack_s is None else 1


def _again(choice: LanguageChoice) -> LanguageChoice:
    """For the next segment of a stream whose language is not sure yet; one that is being asked stays."""
    return LanguageChoice() if choice.code is not None else choice

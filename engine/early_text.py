"""A live stream's text before it is final: partial hypotheses of the open segment, and its end decoded ahead of time.

A *partial* decodes the open segment as far as it has been heard; words that two in a row agree on are committed. The *look
ahead* decodes it, exactly as the final text is decoded, as soon as it has been heard up to where it would stop if the silence
that has begun goes on: by the time this is certain, the final text may be there. If speech goes on it was a partial.

Decides what is decoded when; the windows are the decoder's, the state is the stream's (listeners.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from .decode_job import DecodeJob, DecodeOptions, Finished
from .language_choice import LanguageChoice
from .listeners import LiveListening, LookAhead
from .recording import SAMPLE_RATE
from .segment_decoder import SegmentDecoder
from .transcript import PlacedSegment, Span
from .types import AnyEvent, Partial, Word

_MAX_BESIDE = 2  # windows being decoded beside which there is time to look ahead

MakeJob = Callable[[LiveListening, Span, DecodeOptions, object], DecodeJob]


class EarlyText:
    """Of all streams of one engine. `make_job(stream, span, options, owner)` gives a window of a stream."""

    def __init__(self, decoder: SegmentDecoder, make_job: MakeJob, clock: Callable[[], float]) -> None:
        self._decoder = decoder
        self._make_job = make_job
        self._clock = clock

    # -------------------------------------------------------------------------------------------------- partials

    def started(self, live: LiveListening, sample: int) -> None:
        """Speech began."""
        view = live.partial
        view.start = view.heard = sample
        view.ids = ()
        view.told_at = self._clock()

    def stopped(self, live: LiveListening) -> None:
        """Speech ended: what is being decoded of the open segment is of no use any more."""
        self._decoder.drop(live.partial)
        live.partial.job = None

    def next_partial(self, streams: Sequence[LiveListening]) -> None:
        """Queue the partial that is due first, when its turn would come at once: so it hears all that has come by then.

        Under load partials come as often as there is time for them, the stream that has waited longest first, and final text
        that is due earlier goes before.
        """
        if self._decoder.waiting_due() < math.inf:
            return
        wanting = [live for live in streams if live.wants_partial()]
        if not wanting:
            return
        live = min(wanting, key=_partial_due)
        if _partial_due(live) >= self._decoder.final_due():
            return
        view, span = live.partial, live.partial_span()
        options = dataclasses.replace(
            live.options,
            temperatures=(0.0,),
            beam_size=1,
            timestamps=True,
            alignment=True,
            provisional=True,
            # Nobody speaks faster than this; text that runs on would hold up the others.
            max_tokens=min(live.options.max_tokens, 24 + 12 * (span.end - span.start) // SAMPLE_RATE),
        )
        view.heard = live.heard
        view.job = self._make_job(live, span, options, view)
        view.job.due = _partial_due(live)
        view.job.draft = view.ids
        self._decoder.add(view.job)

    def land_partial(self, live: LiveListening, span: Span, finished: Finished) -> list[AnyEvent]:
        """A new hypothesis of the open segment: what agrees with the one before is committed."""
        view, job = live.partial, finished.job
        view.job = None
        assert finished.result is not None
        view.ids = tuple(finished.result.ids)
        reader = dataclasses.replace(live.reader, timestamps=job.options.timestamps)
        reader.read(span, finished.result, job.language.code or "")
        return self._tell(live, *view.hear(span)) if live.open_start is not None else []

    def settle(self, live: LiveListening, span: Span, placed: list[PlacedSegment]) -> list[AnyEvent]:
        """The segment's final words are known: those that were not told yet are committed."""
        return self._tell(live, live.partial.settle(span, placed), [])

    def _tell(self, live: LiveListening, committed: list[Word], tentative: list[Word]) -> list[AnyEvent]:
        view = live.partial
        said, maybe = _text(committed), _text(tentative)
        if not said and maybe == view.told:
            return []
        view.told, view.told_at = maybe, self._clock()
        told = committed or tentative
        start = told[0].start if told else view.start / SAMPLE_RATE
        return [live.stamp(Partial(request_id=live.request.request_id, committed=said, tentative=maybe, start=start))]

    # ------------------------------------------------------------------------------------------------ look ahead

    def look_ahead(self, live: LiveListening) -> None:
        """After more was heard: begin to decode the open segment's end, or give it up where speech goes on."""
        stop, ahead = live.segmenter.prospect, live.ahead
        if ahead is not None and (ahead.span.start, ahead.span.end) != (live.open_start, stop):
            self._give_up(live, ahead)
        if stop is None or live.open_start is None or live.ahead is not None or live.transcript.num_open:
            return
        if self._decoder.num_waiting or self._decoder.num_running > _MAX_BESIDE:
            return
        start = live.open_start
        span = Span(start=start, end=stop, speech=live.spoken(start, stop), overlap=live.open_overlap)
        live.ahead = LookAhead(span=span)
        language = live.language
        if not language.sure and language.code is not None:
            language = LanguageChoice()  # as final text asks for it
        job = self._make_job(live, span, final_options(live.options, span), live.ahead)
        job.language, job.draft = language, live.partial.ids
        live.ahead.job = job
        self._decoder.add(job)

    def land_ahead(self, live: LiveListening, finished: Finished) -> list[AnyEvent]:
        """The end is decoded before it is certain: keep it, and tell it as a partial where partials are wanted."""
        ahead = live.ahead
        assert ahead is not None and finished.result is not None
        ahead.finished = finished
        live.partial.ids, live.partial.heard = tuple(finished.result.ids), ahead.span.end
        if not live.request.options.partial_s:
            return []
        growing = Span(start=ahead.span.start, end=ahead.span.end, speech=ahead.span.speech, growing=True)
        job = live.partial.job  # an older hypothesis that is still on its way would take words back
        if job is not None:
            self.stopped(live)
        return self.land_partial(live, growing, finished)

    def take(self, live: LiveListening, span: Span) -> LookAhead | None:
        """The look ahead at a segment that has just ended as foreseen; it is the stream's no more."""
        ahead, live.ahead = live.ahead, None
        if ahead is None or (ahead.span.start, ahead.span.end, ahead.span.overlap) == (
            span.start,
            span.end,
            span.overlap,
        ):
            return ahead
        self._decoder.drop(ahead)
        return None

    def forget(self, live: LiveListening) -> None:
        """The stream is over."""
        self._decoder.drop(live.partial)
        if live.ahead is not None:
            self._decoder.drop(live.ahead)

    def _give_up(self, live: LiveListening, ahead: LookAhead) -> None:
        """Speech goes on. What has been encoded is good for a partial."""
        live.ahead = None
        job, view = ahead.job, live.partial
        assert job is not None
        options = job.options
        fit = options.beam_size == 1 and options.timestamps and options.alignment and not job.next_temperature
        if ahead.finished is None and job.audio >= 0 and view.job is None and fit and live.request.options.partial_s:
            ahead.span.growing = True
            view.job, view.heard = job, ahead.span.end
            self._decoder.adopt(job, view, _partial_due(live))
        else:
            self._decoder.drop(ahead)


def final_options(options: DecodeOptions, span: Span) -> DecodeOptions:
    """How the final text of a span is decoded."""
    if span.cautious:
        options = dataclasses.replace(options, temperatures=options.temperatures[:1])
    if span.forced_cut or span.overlap:  # the joint is found by words
        options = dataclasses.replace(options, alignment=True)
    return options


def _partial_due(live: LiveListening) -> float:
    return live.partial.told_at + live.request.options.partial_s


def _text(words: Sequence[Word]) -> str:
    return "".join(word.word for word in words)

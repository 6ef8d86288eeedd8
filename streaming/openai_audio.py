"""POST /v1/audio/transcriptions and /v1/audio/translations: a file in a form becomes text in one of six formats.

The file is decoded in a process of its own, at most `max_decodes` at a time. A short one reaches the engine whole, a long one
piece by piece as it is decoded, so that little of it is here at any time; whatever can be wrong with a request is found
before the status line.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import IO

from msgspec.structs import replace

from ..engine.errors import InvalidRequest, UnsupportedParameter, from_info
from ..engine.types import (
    Aborted,
    AnyEvent,
    AudioRequest,
    Done,
    Failed,
    Recognized,
    Segment,
    TranscribeOptions,
)
from ..pipelines.media import Encoding, MediaLimits
from ..pipelines.subtitles import to_srt, to_vtt
from .audio_words import (
    AnyTranscription,
    DiarizedSegment,
    DiarizedTranscription,
    DurationUsage,
    SegmentBody,
    TextDelta,
    TextDone,
    Transcription,
    TranscriptionForm,
    TranslationForm,
    VADStrategy,
    VerboseTranscription,
    WordBody,
    read_fields,
)
from .exchange import DONE, KEEP_ALIVE, Exchange, new_id, stopped_error
from .languages import language_code, language_name
from .live_stream import RATE
from .multipart import Form, read_form
from .protocol import encode
from .service import Service

FILE = "file"
_WHOLE_FLOATS = 4 * 1024 * 1024  # bytes of a file up to which its samples stay float32; longer ones travel as 16 bits
_WHOLE_PCM = 4 * 1024 * 1024  # bytes of PCM up to which an audio goes to the engine in one message
_REFERENCE_S = (2.0, 10.0)  # of a known speaker's voice
_LADDER_STEP = 0.2  # between two temperatures


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked form: what the engine is asked and how the answer is to look."""

    model: str
    response_format: str
    options: TranscribeOptions
    words: bool = False
    segments: bool = True
    stream: bool = False
    speakers: list[tuple[str, str]] = field(default_factory=list)  # name, data URL


async def transcriptions(exchange: Exchange) -> None:
    await _answer(exchange, translate=False)


async def translations(exchange: Exchange) -> None:
    await _answer(exchange, translate=True)


async def _answer(exchange: Exchange, *, translate: bool) -> None:
    config = exchange.service.config
    form = await read_form(
        exchange, file_field=FILE, max_file_bytes=config.max_upload_bytes, max_field_bytes=config.max_body_bytes
    )
    try:
        if translate:
            job = _translation(read_fields(form.fields, TranslationForm))
        else:
            job = _transcription(read_fields(form.fields, TranscriptionForm))
        if form.file is None:
            raise InvalidRequest("missing required field 'file'", param=FILE, code="missing_parameter")
        await exchange.watched(_recognize(exchange, job, form))
    finally:
        form.close()


# ------------------------------------------------------------------------------------------------- reading the request


def _translation(form: TranslationForm) -> Job:
    return Job(
        model=form.model,
        response_format=form.response_format or "json",
        options=TranscribeOptions(
            task="translate",
            prompt=form.prompt or "",
            temperatures=_ladder(form.temperature),
            beam_size=form.beam_size or 1,
            best_of=form.best_of or 1,
        ),
    )


def _transcription(form: TranscriptionForm) -> Job:
    wanted = form.response_format or "json"
    if form.include:
        raise UnsupportedParameter("'include' is not supported by this server", param="include")
    if form.timestamp_granularities and wanted != "verbose_json":
        raise InvalidRequest(
            "timestamp_granularities: expected response_format 'verbose_json' with it", param="timestamp_granularities"
        )
    if form.stream and wanted not in ("json", "text", "diarized_json"):
        raise InvalidRequest(
            f"stream: expected response_format json, text or diarized_json with it, got {wanted!r}", param="stream"
        )
    languages = ([form.language] if form.language else []) + form.languages
    codes = {language_code(language) for language in languages}
    if len(codes) > 1:
        raise UnsupportedParameter("languages: only one is supported by this server", param="languages")
    names, references = form.known_speaker_names, form.known_speaker_references
    if len(names) != len(references) or len(set(names)) != len(names):
        raise InvalidRequest(
            "known_speaker_names: expected different names, as many as known_speaker_references",
            param="known_speaker_names",
        )
    if names and wanted != "diarized_json":
        raise InvalidRequest(
            "known_speaker_names: expected response_format 'diarized_json' with them", param="known_speaker_names"
        )
    vad = form.chunking_strategy if isinstance(form.chunking_strategy, VADStrategy) else VADStrategy(type="server_vad")
    defaults = TranscribeOptions()
    words = "word" in form.timestamp_granularities
    return Job(
        model=form.model,
        response_format=wanted,
        words=words,
        segments=not form.timestamp_granularities or "segment" in form.timestamp_granularities,
        stream=bool(form.stream),
        speakers=list(zip(names, references, strict=True)),
        options=TranscribeOptions(
            language=codes.pop() if codes else None,
            prompt=form.prompt or "",
            hotwords=", ".join(form.keywords),
            temperatures=_ladder(form.temperature),
            beam_size=form.beam_size or 1,
            best_of=form.best_of or 1,
            word_timestamps=words,
            vad_threshold=defaults.vad_threshold if vad.threshold is None else vad.threshold,
            speech_pad_s=defaults.speech_pad_s if vad.prefix_padding_ms is None else vad.prefix_padding_ms / 1e3,
            min_silence_s=(
                defaults.min_silence_s if vad.silence_duration_ms is None else vad.silence_duration_ms / 1e3
            ),
            diarize=wanted == "diarized_json",
        ),
    )


def _ladder(temperature: float | None) -> tuple[float, ...]:
    """The temperature asked for, and the higher ones that are tried where a guard fails."""
    steps = [temperature or 0.0]
    while steps[-1] + _LADDER_STEP <= 1.0 + 1e-9:
        steps.append(round(steps[-1] + _LADDER_STEP, 6))
    return tuple(steps)


async def _decoded(
    service: Service, source: IO[bytes], *, max_s: float, encoding: Encoding
) -> AsyncGenerator[bytes, None]:
    """A sound file as PCM, piece by piece. Raises InvalidRequest, maybe after some pieces."""
    limits = MediaLimits(
        max_input_bytes=service.config.max_upload_bytes, max_seconds=max_s, max_pcm_bytes=int((max_s + 1) * RATE * 4)
    )
    async with service.decodes:
        async with contextlib.aclosing(service.decoder.decode(source, limits, encoding=encoding)) as pieces:
            async for piece in pieces:
                yield piece


async def _uploaded(service: Service, form: Form, *, encoding: Encoding) -> AsyncGenerator[bytes, None]:
    """`_decoded` of a form's file, which is let go of as soon as it is read."""
    assert form.file is not None
    try:
        decoded = _decoded(service, form.file, max_s=service.config.max_audio_s, encoding=encoding)
        async with contextlib.aclosing(decoded) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        form.close()


async def _up_to(pieces: AsyncGenerator[bytes, None], num_bytes: int) -> tuple[bytes, bool]:
    """The first pieces, until there are so many bytes of them; and whether that is all."""
    kept = bytearray()
    async for piece in pieces:
        kept += piece
        if len(kept) >= num_bytes:
            return bytes(kept), False
    return bytes(kept), True


async def _known_speakers(service: Service, job: Job) -> tuple[tuple[str, bytes], ...]:
    voices = []
    for name, url in job.speakers:
        head, _, data = url.partition(",")
        if not head.startswith("data:") or not head.endswith(";base64"):
            raise InvalidRequest(
                "known_speaker_references: expected data URLs (data:audio/wav;base64,...)",
                param="known_speaker_references",
            )
        try:
            sound = base64.b64decode(data, validate=True)
            with tempfile.TemporaryFile() as file:
                file.write(sound)
                file.flush()
                pieces = _decoded(service, file, max_s=_REFERENCE_S[1] + 0.5, encoding="f32")
                pcm = b"".join([piece async for piece in pieces])
        except (binascii.Error, InvalidRequest) as error:
            why = error.message if isinstance(error, InvalidRequest) else "not base64"
            raise InvalidRequest(f"known_speaker_references: {why}", param="known_speaker_references") from None
        if len(pcm) < _REFERENCE_S[0] * RATE * 4:
            raise InvalidRequest(
                "known_speaker_references: expected 2 to 10 s of speech each", param="known_speaker_references"
            )
        voices.append((name, pcm))
    return tuple(voices)


# --------------------------------------------------------------------------------------------------------- answering


class _Recognition:
    """What has come of one request so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.segments: list[Segment] = []
        self.language = ""
        self.audio_s = 0.0
        self.sent = False  # whether any text has been streamed

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def usage(self) -> DurationUsage:
        return DurationUsage(seconds=round(self.audio_s, 3))

    def answer(self) -> tuple[bytes, bytes]:
        """The whole answer and its content type."""
        match self.job.response_format:
            case "text":
                return f"{self.text}\n".encode(), b"text/plain; charset=utf-8"
            case "srt":
                return to_srt(self.segments).encode(), b"application/x-subrip; charset=utf-8"
            case "vtt":
                return to_vtt(self.segments).encode(), b"text/vtt; charset=utf-8"
        return encode(self._body()), b"application/json"

    def _body(self) -> AnyTranscription:
        if self.job.response_format == "diarized_json":
            return DiarizedTranscription(
                duration=round(self.audio_s, 3),
                text=self.text,
                segments=[DiarizedSegment.of(segment) for segment in self.segments],
                usage=self.usage,
            )
        if self.job.response_format != "verbose_json":
            languages = [{"code": self.language}] if self.language else []
            return Transcription(text=self.text, usage=self.usage, languages=languages)
        verbose = VerboseTranscription(
            task=self.job.options.task,
            language=language_name(self.language),
            duration=round(self.audio_s, 3),
            text=self.text,
            usage=self.usage,
        )
        if self.job.segments:
            verbose = replace(verbose, segments=[SegmentBody.of(segment) for segment in self.segments])
        if self.job.words:
            words = [word for segment in self.segments for word in segment.words or ()]
            verbose = replace(
                verbose,
                words=[
                    WordBody(
                        word=word.word.strip(),
                        start=round(word.start, 3),
                        end=round(word.end, 3),
                        probability=round(word.probability, 4),
                    )
                    for word in words
                ],
            )
        return verbose

    def deltas(self, segments: list[Segment]) -> bytes:
        """New segments as events of the stream. The deltas joined are the text of the last event."""
        frames = []
        diarized = self.job.response_format == "diarized_json"
        for segment in segments:
            text = segment.text if self.sent else segment.text.lstrip()
            if text:
                self.sent = True
                delta = TextDelta(delta=text, segment_id=f"seg_{segment.id}") if diarized else TextDelta(delta=text)
                frames.append(b"data: " + encode(delta) + b"\n\n")
            if diarized:
                frames.append(b"data: " + encode(DiarizedSegment.of(segment)) + b"\n\n")
        return b"".join(frames)


async def _recognize(exchange: Exchange, job: Job, form: Form) -> None:
    service = exchange.service
    model = service.model(job.model, "asr")
    exchange.model = model.id
    client = service.client
    ticket = service.admission.admit(1, 0)
    try:
        await client.load(model.id)
        encoding: Encoding = "f32" if form.file_bytes <= _WHOLE_FLOATS else "s16"
        options = job.options
        if job.speakers:
            options = replace(options, known_speakers=await _known_speakers(service, job))
        request = AudioRequest(request_id=new_id("asr"), model=model.id, options=options, encoding=encoding)
        exchange.engine_ids.append(request.request_id)
        found = _Recognition(job)
        async with contextlib.AsyncExitStack() as stack:
            pieces = await stack.enter_async_context(contextlib.aclosing(_uploaded(service, form, encoding=encoding)))
            request.pcm, whole = await _up_to(pieces, _WHOLE_PCM)
            request.in_pieces = not whole
            started = time.perf_counter()
            rest = pieces if request.in_pieces else None
            events = await stack.enter_async_context(
                contextlib.aclosing(_events(exchange, request, rest, streamed=job.stream))
            )
            async for event in events:
                request.pcm = b""  # the engine has it
                if isinstance(event, Recognized):
                    ticket.leave()
                    found.segments += event.segments
                    found.language = event.language or found.language
                    if job.stream and (frames := found.deltas(event.segments)):
                        if not exchange.streaming:
                            await exchange.start_stream()
                        await exchange.write(frames)
                elif isinstance(event, Done):
                    found.audio_s = event.audio_s
        service.metrics.observe_transcribed(model.id, found.audio_s, total_s=time.perf_counter() - started)
        if not job.stream:
            body, kind = found.answer()
            await exchange.send_bytes(body, kind)
            return
        if not exchange.streaming:
            await exchange.start_stream()
        await exchange.end_stream(b"data: " + encode(TextDone(text=found.text, usage=found.usage)) + b"\n\n" + DONE)
    finally:
        ticket.leave()


async def _events(
    exchange: Exchange, request: AudioRequest, rest: AsyncIterator[bytes] | None, *, streamed: bool
) -> AsyncGenerator[AnyEvent, None]:
    """The engine's events, once it has the `rest` of the audio; raises for its errors.

    A stream that would be silent for long is started and kept alive.
    """
    metrics, stream = exchange.service.metrics, exchange.service.client.submit(request)
    pending: asyncio.Future[AnyEvent | None] | None = None
    try:
        if rest is not None:
            pending = asyncio.ensure_future(_next(stream))
            await asyncio.sleep(0)  # the request leaves before the rest of its audio
            await _feed(exchange.service, request.request_id, rest, pending)
        while True:
            pending = pending or asyncio.ensure_future(_next(stream))
            while not (await asyncio.wait({pending}, timeout=exchange.service.config.sse_keep_alive_s))[0]:
                if streamed:
                    if not exchange.streaming:
                        await exchange.start_stream()
                    await exchange.write(KEEP_ALIVE)
            event, pending = pending.result(), None
            if event is None:
                return
            if isinstance(event, Failed):
                metrics.observe_failed(request.model, event.error.code)
                raise from_info(event.error)
            if isinstance(event, Aborted):
                metrics.observe_aborted(request.model, event.reason)
                raise stopped_error(event.reason)
            yield event
    except asyncio.CancelledError:
        metrics.observe_aborted(request.model, exchange.stop_reason or "shutdown")
        raise
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.wait({pending})
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


async def _feed(
    service: Service, request_id: str, pieces: AsyncIterator[bytes], first_event: asyncio.Future[AnyEvent | None]
) -> None:
    """Send the audio on as it is decoded; stops when the request has ended before its time."""
    async for piece in pieces:
        if first_event.done():
            return
        await service.client.append(request_id, [], pcm=piece)
    await service.client.append(request_id, [], last=True)


async def _next(events: AsyncIterator[AnyEvent]) -> AnyEvent | None:
    return await anext(events, None)

"""POST /v1/audio/speech: text becomes sound, sent while it is spoken; and GET /v1/audio/voices, who can speak here.

The sound leaves as the bytes of a file, or with stream_format "sse" as events that hold them in base64. Whatever can be wrong
with a request is found before the status line; what fails later breaks off the connection, or is an event.
"""

from __future__ import annotations

import base64
import contextlib

import msgspec

from ..engine.errors import MotetError
from ..pipelines.sound_file import CONTENT_TYPES
from .exchange import DONE, KEEP_ALIVE, Exchange
from .protocol import encode
from .speaking import Sound, Speaking
from .speech_words import AudioDelta, AudioDone, SpeechCreate, VoiceBody, VoiceList, VoiceReference

_decoder = msgspec.json.Decoder(SpeechCreate)


async def speech(exchange: Exchange) -> None:
    request = await exchange.read_json(_decoder)
    await exchange.watched(_answer(exchange, request))


async def _answer(exchange: Exchange, request: SpeechCreate) -> None:
    service = exchange.service
    model = service.model(request.model, "tts")
    exchange.model = model.id
    kind = request.response_format or "mp3"
    events = request.stream_format == "sse"
    speaking = Speaking(
        service,
        model,
        request.input,
        voice=request.voice.id if isinstance(request.voice, VoiceReference) else request.voice,
        seed=request.seed,
        temperature=request.temperature,
        started=exchange.started,
    )

    async def begin() -> None:
        if not exchange.streaming:
            if events:
                await exchange.start_stream()
            else:
                await exchange.start_stream(CONTENT_TYPES[kind].encode())

    async def send(data: bytes) -> None:
        if data:
            await begin()
            await exchange.write(_delta(data) if events else data)

    async def keep_alive() -> None:
        await begin()
        await exchange.write(KEEP_ALIVE)

    ticket = service.admission.admit(1, len(request.input))
    try:
        exchange.engine_ids.append(speaking.request.request_id)
        sound = Sound(kind, request.speed or 1.0)
        pieces = speaking.pieces(lambda: exchange.stop_reason or "shutdown", keep_alive if events else None)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                ticket.leave()
                await send(await sound.push(piece.pcm))
        rest = await sound.finish()
        await begin()
        if events:
            last = b"data: " + encode(AudioDone(usage=speaking.usage)) + b"\n\n" + DONE
            await exchange.end_stream((_delta(rest) if rest else b"") + last)
        else:
            await exchange.end_stream(rest)
    finally:
        ticket.leave()


def _delta(data: bytes) -> bytes:
    return b"data: " + encode(AudioDelta(audio=base64.b64encode(data).decode())) + b"\n\n"


async def voices(exchange: Exchange) -> None:
    """Every voice of every model that speaks. A model that cannot be loaded hides no other; the error, when there is none."""
    service = exchange.service
    found: list[VoiceBody] = []
    failure: MotetError | None = None
    for model in service.config.models:
        if model.kind == "tts":
            try:
                voice = await service.speech.format(model.id)
            except MotetError as error:
                failure = error
                continue
            found += [
                VoiceBody(
                    id=name,
                    name=name,
                    model=model.id,
                    language=voice.language,
                    default=name == voice.default_voice,
                )
                for name in voice.voices
            ]
    if failure is not None and not found:
        raise failure
    await exchange.send_struct(VoiceList(voices=found))

"""Words of the speech routes: what a client may ask of a voice, and every shape of the answers.

The formats and their content types are those of pipelines/sound_file.py. "opus" comes in an Ogg container, "aac" in ADTS frames;
"pcm" is the bare samples: signed 16 bits, little-endian, mono, 24 kHz.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from ..pipelines.sound_file import FASTEST, SLOWEST, SoundFormat
from .config import DEFAULT_MODEL

Speed: TypeAlias = Annotated[float, Meta(ge=SLOWEST, le=FASTEST)]


class VoiceReference(Struct, forbid_unknown_fields=True, kw_only=True):
    """A voice by its id, as /v1/audio/voices lists it."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]


class SpeechCreate(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/audio/speech."""

    input: str
    model: str = DEFAULT_MODEL
    voice: Annotated[str, Meta(max_length=200)] | VoiceReference = DEFAULT_MODEL
    response_format: SoundFormat | None = None  # null: mp3
    speed: Speed | None = None
    stream_format: Literal["audio", "sse"] | None = None
    instructions: Annotated[str, Meta(max_length=10_000)] | None = None  # harmless: no voice here takes directions

    # Ours: the same seed gives the same sound; a temperature other than the voice's own.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None

    # Harmless: accepted, ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None


class SpeechUsage(Struct, frozen=True, kw_only=True):
    """Tokens of the prompts, and of what was made from them."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class AudioDelta(Struct, frozen=True, kw_only=True):
    """An event of the stream: the next bytes of the sound, in base64."""

    audio: str
    type: Literal["speech.audio.delta"] = "speech.audio.delta"


class AudioDone(Struct, frozen=True, kw_only=True):
    usage: SpeechUsage
    type: Literal["speech.audio.done"] = "speech.audio.done"


class VoiceBody(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    model: str
    language: str
    default: bool  # of its model
    object: Literal["audio.voice"] = "audio.voice"


class VoiceList(Struct, frozen=True, kw_only=True):
    voices: list[VoiceBody]


# ------------------------------------------------------------------------- the WebSocket: what the client says


class TextPiece(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class Flush(Struct, tag_field="type", tag="flush", forbid_unknown_fields=True):
    pass


class Cancel(Struct, tag_field="type", tag="cancel", forbid_unknown_fields=True):
    pass


class End(Struct, tag_field="type", tag="end", forbid_unknown_fields=True):
    pass


SpokenWord: TypeAlias = TextPiece | Flush | Cancel | End


# ------------------------------------------------------------------------- and the server


class Ready(Struct, frozen=True, kw_only=True):
    model: str
    voice: str
    format: SoundFormat
    content_type: str
    rate: int
    channels: int
    session_id: str
    type: Literal["ready"] = "ready"


class UtteranceMark(Struct, frozen=True, kw_only=True):
    """An utterance begins in the sound that follows; with `end_s`, it has ended."""

    index: int
    text: str
    start_s: float
    end_s: float | UnsetType = UNSET
    type: Literal["utterance"] = "utterance"


class Flushed(Struct, frozen=True, kw_only=True):
    audio_s: float
    type: Literal["flushed"] = "flushed"


class Cancelled(Struct, frozen=True, kw_only=True):
    audio_s: float
    type: Literal["cancelled"] = "cancelled"


class SpeechDone(Struct, frozen=True, kw_only=True):
    audio_s: float
    usage: SpeechUsage
    type: Literal["done"] = "done"

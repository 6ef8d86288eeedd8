"""Words of the REST audio routes: the fields of their forms, and every shape of their answers.

Forms are read from multipart pairs: `x`, `x[]` and `x[0]` name an entry of the list x, and `x[y]` the field y of the
object x. Unknown fields are refused by name, and so is what we know but cannot do.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..engine.errors import InvalidRequest
from ..engine.types import Segment
from .config import DEFAULT_MODEL
from .exchange import named_error

T = TypeVar("T", bound=Struct)

Language: TypeAlias = Annotated[str, Meta(max_length=40)]
Text: TypeAlias = Annotated[str, Meta(max_length=10_000)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class VADStrategy(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(gt=0, lt=1)] | None = None
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=2000)] | None = None
    silence_duration_ms: Annotated[int, Meta(ge=32, le=10_000)] | None = None


class TranslationForm(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str = DEFAULT_MODEL
    prompt: Text | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Temperature | None = None  # 0: rises by itself where a guard fails
    beam_size: Annotated[int, Meta(ge=1, le=16)] | None = None  # ours, at temperature 0
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None  # ours, at temperatures above 0


class TranscriptionForm(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str = DEFAULT_MODEL
    language: Language | None = None
    languages: list[Language] = []
    prompt: Text | None = None
    keywords: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=200)] = []
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] | None = None
    temperature: Temperature | None = None
    timestamp_granularities: list[Literal["word", "segment"]] = []
    stream: bool | None = None
    chunking_strategy: Literal["auto"] | VADStrategy | None = None
    include: list[str] = []
    known_speaker_names: Annotated[list[Annotated[str, Meta(min_length=1, max_length=100)]], Meta(max_length=4)] = []
    known_speaker_references: Annotated[list[str], Meta(max_length=4)] = []
    beam_size: Annotated[int, Meta(ge=1, le=16)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None


_LISTS = {
    "languages",
    "keywords",
    "timestamp_granularities",
    "include",
    "known_speaker_names",
    "known_speaker_references",
}
_OBJECTS = {"chunking_strategy"}
_ENTRY = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<key>[A-Za-z0-9_]*)\])?")


def read_fields(fields: list[tuple[str, str]], kind: type[T]) -> T:
    """A form's pairs as one of the structs above. Raises InvalidRequest with the field as `param`."""
    values: dict[str, Any] = {}
    for written, value in fields:
        found = _ENTRY.fullmatch(written)
        if found is None:
            raise _unknown(written)
        name, key = found["name"], found["key"]
        if name in _LISTS and (not key or key.isdigit()):
            values.setdefault(name, []).append(value)
        elif name in _OBJECTS and key:
            target = values.setdefault(name, {})
            if not isinstance(target, dict) or key in target:
                raise _twice(written)
            target[key] = value
        elif key is not None:
            raise _unknown(written)
        elif name in values:
            raise _twice(written)
        elif name in _OBJECTS and value.lstrip().startswith("{"):
            try:
                values[name] = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError):
                raise InvalidRequest(f"{name}: expected an object as JSON", param=name) from None
        elif value or name in ("model", "response_format"):
            values[name] = value  # an empty field asks for nothing
        elif name not in kind.__struct_fields__:
            raise _unknown(written)
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise named_error(error) from None


def _unknown(name: str) -> InvalidRequest:
    return InvalidRequest(f"unknown field {name[:100]!r}", param=name[:100], code="unknown_parameter")


def _twice(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name[:100]}: given twice", param=name[:100])


# ------------------------------------------------------------------------------------------------------------ answers


class DurationUsage(Struct, frozen=True, kw_only=True):
    seconds: float
    type: Literal["duration"] = "duration"


class Transcription(Struct, frozen=True, kw_only=True):
    text: str
    usage: DurationUsage
    languages: list[dict[str, str]] = []  # those that were recognised, as {"code": "en"}


class WordBody(Struct, frozen=True, kw_only=True):
    word: str
    start: float
    end: float
    probability: float


class SegmentBody(Struct, frozen=True, kw_only=True):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float

    @classmethod
    def of(cls, segment: Segment) -> SegmentBody:
        return cls(
            id=segment.id,
            seek=segment.seek,
            start=round(segment.start, 3),
            end=round(segment.end, 3),
            text=segment.text,
            tokens=segment.tokens,
            temperature=segment.temperature,
            avg_logprob=segment.avg_logprob,
            compression_ratio=segment.compression_ratio,
            no_speech_prob=segment.no_speech_prob,
        )


class VerboseTranscription(Struct, frozen=True, kw_only=True):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    usage: DurationUsage
    segments: list[SegmentBody] | UnsetType = UNSET
    words: list[WordBody] | UnsetType = UNSET


class DiarizedSegment(Struct, frozen=True, kw_only=True):
    """A part of the answer, and an event of the stream."""

    id: str
    start: float
    end: float
    text: str
    speaker: str
    type: Literal["transcript.text.segment"] = "transcript.text.segment"

    @classmethod
    def of(cls, segment: Segment) -> DiarizedSegment:
        return cls(
            id=f"seg_{segment.id}",
            start=round(segment.start, 3),
            end=round(segment.end, 3),
            text=segment.text,
            speaker=segment.speaker or "unknown",
        )


class DiarizedTranscription(Struct, frozen=True, kw_only=True):
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: DurationUsage
    task: Literal["transcribe"] = "transcribe"


class TextDelta(Struct, frozen=True, kw_only=True):
    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    segment_id: str | UnsetType = UNSET


class TextDone(Struct, frozen=True, kw_only=True):
    text: str
    usage: DurationUsage
    type: Literal["transcript.text.done"] = "transcript.text.done"


AnyTranscription: TypeAlias = Transcription | VerboseTranscription | DiarizedTranscription

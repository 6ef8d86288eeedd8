"""What the SDK takes and gives: plain frozen dataclasses, no tensors, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..engine.frontend.events import TextLogprob
from ..engine.types import FinishReason, SamplingParams, Segment, Timing, TranscribeOptions, Usage, Word
from .subtitles import to_srt, to_vtt

if TYPE_CHECKING:
    from PIL.Image import Image

    from .sound_file import SoundFormat

Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt: TypeAlias = str | Sequence[Message]
Prompts: TypeAlias = list[str] | list[Sequence[Message]] | list[list[dict[str, Any]]] | list[list[dict[str, str]]]


class ChatOptions(TypedDict, total=False):
    """What one answer may be asked for by keyword; the names and meanings of `SamplingParams`, and those of text."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    penalty_window: int
    logit_bias: dict[int, float]
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    params: SamplingParams  # all of them at once; single keywords win over it
    stop: str | Sequence[str]  # the answer ends before the first of these texts
    system: str  # a system message put in front of the prompt
    priority: int  # lower runs earlier


@dataclass(frozen=True, kw_only=True)
class ChatTiming:
    """Seconds, as the engine saw them. `tokens_per_s` counts the tokens after the first."""

    queue_s: float
    ttft_s: float
    total_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, timing: Timing, usage: Usage) -> ChatTiming:
        decoding_s = timing.total_s - timing.first_token_s
        num_decoded = usage.num_output_tokens - 1
        return cls(
            queue_s=timing.queue_s,
            ttft_s=timing.first_token_s,
            total_s=timing.total_s,
            tokens_per_s=num_decoded / decoding_s if num_decoded > 0 and decoding_s > 0 else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class ChatResult:
    """A whole answer. Prints as its text.

    `finish_reason` is "stop" (end of turn, a stop text or id, named by `stop_reason`) or "length".
    `token_ids` are the ids behind `text`; `logprobs` holds one entry per token when `logprobs=k` was asked.
    """

    text: str
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timing: ChatTiming
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] | None = None

    def __str__(self) -> str:
        return self.text


# -------------------------------------------------------------------------------------------------------- recognition

Samples: TypeAlias = NDArray[np.float32] | NDArray[np.int16]  # [T], mono; floats in [-1, 1]
Audio: TypeAlias = str | os.PathLike[str] | bytes | Samples  # a file, the bytes of a file, or samples
PCM: TypeAlias = bytes | Samples  # a piece of live audio; bytes are little-endian 16-bit samples


class TranscriptionOptions(TypedDict, total=False):
    """What a transcription may be asked for by keyword; names and meanings are those of `TranscribeOptions`."""

    task: Literal["transcribe", "translate"]
    language: str | None
    prompt: str
    hotwords: str
    temperature: float  # one instead of the list of those tried one after the other
    temperatures: Sequence[float]
    beam_size: int
    patience: float
    length_penalty: float | None
    best_of: int
    compression_ratio_threshold: float
    logprob_threshold: float
    no_speech_threshold: float
    suppress_tokens: Sequence[int] | None
    word_timestamps: bool
    timestamps: bool
    vad: bool
    vad_threshold: float
    min_silence_s: float
    end_silence_s: float
    speech_pad_s: float
    max_segment_s: float
    partial_s: float
    seed: int
    diarize: bool
    num_speakers: int | None
    known_speakers: Mapping[str, Audio]  # a few seconds of each known voice
    options: TranscribeOptions  # all of them at once; single keywords win over it
    sample_rate: int  # of samples and live audio (files know their own); default 16,000
    priority: int  # lower runs earlier


@dataclass(frozen=True, kw_only=True)
class TranscriptTiming:
    """Seconds, as the engine saw them. `speed` is seconds of audio per second of work."""

    queue_s: float
    total_s: float
    speed: float


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A whole transcript. Prints as its text.

    Times are seconds from the start of the audio, `duration` is its length. `words` are empty unless `word_timestamps` was
    asked for; each keeps its leading space, as in its segment.
    """

    text: str
    segments: tuple[Segment, ...]
    language: str
    language_probability: float
    duration: float
    task: str
    timing: TranscriptTiming

    @property
    def words(self) -> tuple[Word, ...]:
        return tuple(word for segment in self.segments for word in segment.words or ())

    def to_srt(self, *, max_chars: int = 0) -> str:
        """SubRip subtitles; `max_chars` splits segments whose words have times."""
        return to_srt(self.segments, max_chars=max_chars)

    def to_vtt(self, *, max_chars: int = 0) -> str:
        """WebVTT subtitles; `max_chars` splits segments whose words have times."""
        return to_vtt(self.segments, max_chars=max_chars)

    def to_json(self, *, indent: int | None = None) -> str:
        """The fields that OpenAI's `verbose_json` has, and speakers where there are some."""
        found = {
            "task": self.task,
            "language": self.language,
            "duration": round(self.duration, 3),
            "text": self.text,
            "segments": [_without_none(segment) for segment in self.segments],
        }
        if self.words:
            found["words"] = [_without_none(word) for word in self.words]
        return json.dumps(found, ensure_ascii=False, indent=indent)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class SpeechMark:
    """Live: somebody began or stopped to speak, `at_s` seconds into the stream."""

    what: Literal["started", "stopped"]
    at_s: float


@dataclass(frozen=True, kw_only=True)
class PartialText:
    """Live, while somebody speaks: `committed` is new text that stays; `tentative` follows it and may still change."""

    committed: str
    tentative: str
    start: float


TranscriptEvent: TypeAlias = SpeechMark | PartialText | Segment


def _without_none(value: Segment | Word) -> dict[str, Any]:
    """A struct as a mapping, without what was not asked for; words of a segment are listed beside the segments."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return {key: item for key, item in found.items() if item is not None and key != "words"}


# ---------------------------------------------------------------------------------------------------------- synthesis

SPEECH_RATE = 24_000  # of all speech that is made, in Hz; mono


class SpeechOptions(TypedDict, total=False):
    """What speech may be asked for by keyword. Sampling is the voice's own, except for what is given."""

    voice: str | None  # None: the model's default
    speed: float  # 0.25 to 4, at the same pitch; default 1
    temperature: float
    top_p: float
    top_k: int
    seed: int | None  # the same seed, the same audio
    params: SamplingParams  # all of them at once; single keywords win over it
    idle_s: float  # text that streams in: after so long a pause what has come is spoken
    priority: int  # lower runs earlier


@dataclass(frozen=True, kw_only=True)
class SpeechPiece:
    """Some of the speech, as it comes: mono 16-bit little-endian PCM at 24 kHz. `text` is what begins to be said in it."""

    pcm: bytes = field(repr=False)
    text: str = ""

    @property
    def samples(self) -> NDArray[np.float32]:
        """float32 [T] in [-1, 1]."""
        return _to_floats(self.pcm)

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.pcm) / 2 / SPEECH_RATE


@dataclass(frozen=True, kw_only=True)
class SpeechTiming:
    """Seconds. `first_audio_s` is the wait until the first sound; `rtf` is time spent per second of speech (below 1: faster
    than it is heard)."""

    queue_s: float
    first_audio_s: float
    total_s: float
    rtf: float


@dataclass(frozen=True, kw_only=True)
class SpeechResult:
    """All of the speech. `text` is what was said, spelled out; `pcm` is mono 16-bit little-endian at `sample_rate`."""

    text: str
    pcm: bytes = field(repr=False)
    sample_rate: int = SPEECH_RATE
    finish_reason: FinishReason
    usage: Usage
    timing: SpeechTiming

    @property
    def samples(self) -> NDArray[np.float32]:
        """float32 [T] in [-1, 1]."""
        return _to_floats(self.pcm)

    @property
    def samples_int16(self) -> NDArray[np.int16]:
        """int16 [T]."""
        return np.frombuffer(self.pcm, "<i2").astype(np.int16)

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.pcm) / 2 / self.sample_rate

    def encode(self, format: SoundFormat) -> bytes:
        """The bytes of a file: "mp3", "opus", "aac", "flac", "wav" or "pcm". Raises InvalidRequest for another format."""
        from .sound_file import encode  # brings the codecs

        return encode(self.pcm, format)

    def save(self, path: str | os.PathLike[str], format: SoundFormat | None = None) -> None:
        """Write a file, in `format` or that of the name's ending. Raises InvalidRequest for an unknown one, OSError."""
        from .sound_file import write_file

        write_file(path, [self.pcm], format)


def _to_floats(pcm: bytes) -> NDArray[np.float32]:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


# ----------------------------------------------------------------------------------------------------------- pictures

# A file, the bytes of a file, a PIL image, or uint8 [H, W], [H, W, 3] or [H, W, 4].
ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[np.uint8] | Image"


class ImageOptions(TypedDict, total=False):
    """What pictures may be asked for by keyword. What is not given, or None, is the model's own."""

    negative_prompt: str  # what shall not be seen
    size: str | tuple[int, int]  # "WxH" or (width, height); the model says which there are (`sizes`)
    width: int  # instead of `size`, with `height`
    height: int
    steps: int | None
    guidance_scale: float | None  # how closely the prompt is followed
    seed: int | None  # the same seed, the same picture; picture i of n has seed + i. None: drawn
    solver: str | None
    image: ImageSource | None  # the picture to begin with; scaled until it covers the size, what stands over is cut off
    strength: float | None  # with `image`: near 0 keeps it, 1 forgets it; default 0.8
    num_previews: int  # of each picture, in streams; default 0
    priority: int  # lower runs earlier


@dataclass(frozen=True, kw_only=True)
class ImageProgress:
    """Picture `index` has `step` of `num_steps` steps behind it. `preview`, RGB, may be some steps older."""

    index: int
    step: int
    num_steps: int
    preview: Image | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class MadePicture:
    """A finished picture, RGB, and the seed that makes it again alone. `index` is its place among the n of its request."""

    index: int
    seed: int
    image: Image


ImageEvent: TypeAlias = ImageProgress | MadePicture


@dataclass(frozen=True, kw_only=True)
class ImageTiming:
    """Seconds, as the engine saw them."""

    queue_s: float
    first_picture_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """All pictures of a request, in the order of their indices."""

    pictures: tuple[MadePicture, ...]
    usage: Usage
    timing: ImageTiming

    @property
    def images(self) -> list[Image]:
        return [picture.image for picture in self.pictures]

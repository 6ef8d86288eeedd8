"""What a speech language model reads and writes: how text becomes prompt ids, which ids may follow, and how ids become the
frames of a codec. Torch-free: frontends make prompts with it, the speech engine masks, stops and de-interleaves with it.

A voice is a folder with `speech.json` (or a hub snapshot of Orpheus), and its `family` is one of

    motet-voice  SOT letters EOT SOP -> phones SOA -> codes EOA. The model spells the words out in phones before it speaks.
    orpheus      "voice: text" between special ids -> codes until end_of_speech. A Llama with SNAC's 3 levels.
    neutts       a prompt with a reference's text and codes -> codes of one level, until the end id.

Every family generates in *phases*, each under a cyclic mask of id ranges with one id that ends it. A frame lasts as long as
one code of the coarsest level. Its codes come depth first, each level's code before the finer ones that it covers (strides
4, 2, 1: c0 c1 c2 c2 c1 c2 c2), and each *place* has ids of its own: id = first + place * size + code. So a mask by place is a
range, 0 is a code like any other, and no other id can come.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..engine.errors import InvalidRequest, ModelLoadError
from .tokenizer import Tokenizer, load_tokenizer

FILE = "speech.json"
SAMPLE_RATE = 24_000
_MAX_JSON_BYTES = 16 << 20

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # half-open ranges of ids
Read = TypeVar("Read")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a voice wants its ids drawn; words as in SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    penalty_window: int = 0


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of generation. `masks[i % len(masks)]` are the ids allowed for output token i; `stop` ends the phase and is
    no output; at least `min_tokens` come before it."""

    name: Literal["phones", "codes"]
    masks: tuple[Ranges, ...]
    stop: int
    sampling: Sampling
    min_tokens: int


@dataclass(frozen=True, kw_only=True)
class SpeechFormat(ABC):
    """A voice's words, ids and limits. Immutable; methods may be called from several threads."""

    family: str
    name: str
    voices: tuple[str, ...]
    default_voice: str
    language: str
    letters: str | None  # the only characters that `prompt` takes; None: any text
    max_chars: int  # of one utterance
    first: int  # id of code 0 at place 0
    size: int  # codes of one level
    strides: tuple[int, ...]  # of the levels, coarsest first, in latent frames of the codec
    end: int  # id that ends the codes
    sampling: Sampling  # of codes
    frame_samples: int  # that a frame of codes becomes
    codec: str  # folder of the codec: inside of the voice's folder, or any model name
    carry_s: float = 0.0  # seconds of earlier speech that may stand in front of the next utterance
    trim_below: float = 0.0  # leading and trailing audio of less RMS than this is not speech; 0: nothing is cut
    sample_rate: int = SAMPLE_RATE

    # ------------------------------------------------------------------------------------------------------ the text

    @abstractmethod
    def prompt(self, text: str, voice: str | None = None) -> list[int]:
        """Prompt ids of one utterance. Raises InvalidRequest (param "input" or "voice") for what it cannot speak."""

    def voice(self, name: str | None) -> str:
        """The voice that a request means; None, "" and "default" are the default one. Raises InvalidRequest."""
        if name in (None, "", "default"):
            return self.default_voice
        if name not in self.voices:
            known = ", ".join(self.voices)
            raise InvalidRequest(f"voice: {self.name} has {known}; got {str(name)[:40]!r}", param="voice")
        assert name is not None
        return name

    def check_text(self, text: str) -> None:
        """Raise InvalidRequest for a text that is empty, too long for one utterance, or has letters this voice cannot read."""
        if not text.strip():
            raise InvalidRequest("input: expected text to speak, got none", param="input")
        if len(text) > self.max_chars:
            raise InvalidRequest(
                f"input: an utterance of {self.name} has at most {self.max_chars} characters, got {len(text)}",
                param="input",
            )
        if self.letters is not None:
            strange = sorted(set(text) - set(self.letters))
            if strange:
                raise InvalidRequest(f"input: {self.name} cannot read {''.join(strange[:10])!r}", param="input")

    # ---------------------------------------------------------------------------------------------------- generation

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is generated after the prompt, in this order; the last phase is the codes."""
        return (self.codes_phase,)

    @cached_property
    def codes_phase(self) -> Phase:
        own: list[Ranges] = [
            ((self.first + place * self.size, self.first + (place + 1) * self.size),)
            for place in range(self.num_places)
        ]
        own[0] = (*own[0], (self.end, self.end + 1))
        return Phase(name="codes", masks=tuple(own), stop=self.end, sampling=self.sampling, min_tokens=self.num_places)

    def phase_prompt(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[int]:
        """Ids in front of phase number len(outputs): the prompt, then what each earlier phase said and its stop id."""
        ids = list(prompt)
        for phase, output in zip(self.phases, outputs, strict=False):
            ids += [*output, phase.stop]
        return ids

    def max_tokens(self, prompt: Sequence[int], phase: int = -1) -> int:
        """Output tokens that a phase may have for an utterance's own prompt: several times what speech needs, so that
        reaching it means that the model does not find its end."""
        return self._frames_within(self.max_seconds(prompt)) * self.num_places

    @abstractmethod
    def max_seconds(self, prompt: Sequence[int]) -> float:
        """Longest audio that is believed to be this prompt's."""

    def spoken(self, prompt: Sequence[int], codes: Sequence[int]) -> list[int]:
        """An utterance that was spoken, as it stands in front of the next one's prompt where `carry_s` allows it."""
        return [*prompt, *codes, self.end]

    # --------------------------------------------------------------------------------------------------------- codes

    @property
    def num_places(self) -> int:
        """Codes of a frame (K)."""
        return len(self._places)

    @property
    def tokens_per_s(self) -> float:
        """Codes of one second of speech."""
        return self.num_places * self.sample_rate / self.frame_samples

    def frames(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Codes [T, K] of output ids, K in the codec's order: the levels one after the other, each in order of time
        (c0 c1 c1 c2 c2 c2 c2). An unfinished frame at the end is left out. ValueError for an id that is not its place's.
        """
        num_places = self.num_places
        codes = np.asarray(ids[: len(ids) // num_places * num_places], np.int64).reshape(-1, num_places)
        codes = codes - self.first - np.arange(num_places) * self.size
        if codes.size and not (codes.min() >= 0 and codes.max() < self.size):
            raise ValueError("an id stands at a place of the frame that is not its own")
        return codes[:, self._by_level]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """The codes of a frame in their order: (level, how many of that level come before it in the frame)."""
        counts = [0] * len(self.strides)
        order: list[tuple[int, int]] = []

        def descend(level: int) -> None:
            order.append((level, counts[level]))
            counts[level] += 1
            if level + 1 < len(self.strides):
                for _ in range(self.strides[level] // self.strides[level + 1]):
                    descend(level + 1)

        descend(0)
        return order

    @cached_property
    def _by_level(self) -> list[int]:
        return sorted(range(self.num_places), key=lambda place: self._places[place])

    def _frames_within(self, seconds: float) -> int:
        return max(1, math.ceil(seconds * self.sample_rate / self.frame_samples))


# ------------------------------------------------------------------------------------------------------- the families


@dataclass(frozen=True, kw_only=True)
class LetterVoice(SpeechFormat):
    """Family motet-voice: letters in, phones, codes out."""

    first_letter: int
    text_start: int
    text_end: int
    phones: tuple[str, ...]
    first_phone: int
    phones_start: int
    codes_start: int
    phone_sampling: Sampling = GREEDY

    def prompt(self, text: str, voice: str | None = None) -> list[int]:
        self.voice(voice)
        self.check_text(text)
        assert self.letters is not None
        ids = [self.first_letter + self.letters.index(letter) for letter in text]
        return [self.text_start, *ids, self.text_end, self.phones_start]

    @cached_property
    def _phones_phase(self) -> Phase:
        allowed = ((self.first_phone, self.first_phone + len(self.phones)), (self.codes_start, self.codes_start + 1))
        return Phase(name="phones", masks=(allowed,), stop=self.codes_start, sampling=self.phone_sampling, min_tokens=1)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (self._phones_phase, self.codes_phase)

    def max_tokens(self, prompt: Sequence[int], phase: int = -1) -> int:
        if self.phases[phase].name == "phones":
            return 16 + 2 * len(prompt)  # spoken English has fewer phones than letters
        return super().max_tokens(prompt, phase)

    def max_seconds(self, prompt: Sequence[int]) -> float:
        return 1.5 + 0.15 * len(prompt)  # twice as long as slow speech: 13 letters a second


@dataclass(frozen=True, kw_only=True)
class OrpheusVoice(SpeechFormat):
    """Family orpheus. Its checkpoint's configured EOS never ends speech; `end` does."""

    folder: Path
    before: tuple[int, ...]  # start_of_human
    after: tuple[int, ...]  # end of text, end_of_human, start_of_ai, start_of_speech
    between: tuple[int, ...]  # end_of_ai, between two utterances

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def prompt(self, text: str, voice: str | None = None) -> list[int]:
        name = self.voice(voice)
        self.check_text(text)
        # What users write is never read as a special token, so no text can end the prompt or begin speech.
        return [*self.before, *self.tokenizer.encode(f"{name}: {text}"), *self.after]

    def max_seconds(self, prompt: Sequence[int]) -> float:
        return 4.0 + 0.9 * max(1, len(prompt) - 8)  # a text token is spoken in about 0.3 s

    def spoken(self, prompt: Sequence[int], codes: Sequence[int]) -> list[int]:
        return [*prompt, *codes, self.end, *self.between]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A voice to imitate: what it says in `codes`."""

    text: str
    codes: list[int]


@dataclass(frozen=True, kw_only=True)
class ReferenceVoice(SpeechFormat):
    """Family neutts: one level of codes, and voices that are a reference's text and codes. The same reference stands in front
    of every prompt, so the prefix cache holds it."""

    folder: Path
    before: str  # of the text, special tokens spelled out
    after: str
    references: dict[str, Reference]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def prompt(self, text: str, voice: str | None = None) -> list[int]:
        reference = self.references[self.voice(voice)]
        self.check_text(text)
        encode = self.tokenizer.encode
        return [
            *encode(self.before, add_special_tokens=False, parse_special=True),
            *encode(f"{reference.text} {text}".strip(), add_special_tokens=False),
            *encode(self.after, add_special_tokens=False, parse_special=True),
            *(self.first + code for code in reference.codes),
        ]

    def max_seconds(self, prompt: Sequence[int]) -> float:
        num_text = sum(not self.first <= index < self.first + self.size for index in prompt)
        return 4.0 + 0.5 * num_text


# ----------------------------------------------------------------------------------------------------------- the file


class _Text(msgspec.Struct, kw_only=True):
    letters: str
    first: int
    start: int
    end: int


class _Phones(msgspec.Struct, kw_only=True):
    names: list[str]
    first: int
    start: int


class _Audio(msgspec.Struct, kw_only=True):
    first: int
    size: int
    strides: list[int]
    end: int
    start: int = -1
    order: str = "depth_first"


class _Prompt(msgspec.Struct, kw_only=True):
    before: list[int] | str
    after: list[int] | str
    between: list[int] = []


class _File(msgspec.Struct, kw_only=True):
    family: str
    voices: list[str]
    audio: _Audio
    name: str = ""
    default_voice: str = ""
    language: str = "en"
    codec: str = "codec"
    sampling: Sampling | None = None
    phone_sampling: Sampling = GREEDY
    max_chars: int | None = None
    carry_s: float | None = None
    trim_below: float | None = None
    text: _Text | None = None
    phones: _Phones | None = None
    prompt: _Prompt | None = None
    references: dict[str, Reference] = {}


# Orpheus' own ids, after Llama 3's 128256: <custom_token_N> = 128256 + N.
_ORPHEUS_VOCAB = 156_940
_ORPHEUS_AUDIO = _Audio(first=128_266, size=4096, strides=[4, 2, 1], end=128_258, start=128_257)
_ORPHEUS_PROMPT = _Prompt(before=[128_259], after=[128_009, 128_260, 128_261, 128_257], between=[128_262])
_ORPHEUS_SAMPLING = Sampling(
    temperature=0.6,
    top_p=0.9,
    repetition_penalty=1.1,
    penalty_window=560,  # 80 frames. Ours: so that what was said long ago, or in an earlier utterance, weighs nothing
)
_ORPHEUS_VOICES = {
    "en": "tara leah jess leo dan mia zac zoe",
    "fr": "pierre amelie marie",
    "de": "jana thomas max",
    "ko": "유나 준서",
    "hi": "ऋतिका",
    "zh": "长乐 白芷",
    "es": "javi sergio maria",
    "it": "pietro giulia carlo",
}
_DEFAULT_SAMPLING = {
    "motet-voice": Sampling(temperature=0.3, top_k=50),
    "orpheus": _ORPHEUS_SAMPLING,
    "neutts": Sampling(temperature=1.0, top_k=50),
}


def is_voice(folder: Path) -> bool:
    """Whether a model folder speaks: it has `speech.json`, or is a snapshot of Orpheus."""
    return (folder / FILE).is_file() or _is_orpheus(folder)


def load_format(folder: str | Path) -> SpeechFormat:
    """The format of the voice in `folder`, or of a voice of ONNX. Raises ModelLoadError saying which field is wrong."""
    folder = Path(folder)
    if folder.suffix == ".onnx":
        from .synthesizer import load_synthesizer_format  # it is made of this file's classes

        return load_synthesizer_format(folder)
    path = folder / FILE
    if path.is_file():
        return _from_file(folder, _read(path, _File))
    if _is_orpheus(folder):
        return _from_file(folder, _orpheus_file(folder))
    raise ModelLoadError(f"{folder}: expected {FILE}, or a snapshot of Orpheus")


def _read(path: Path, kind: type[Read]) -> Read:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{path.name}: {len(data)} bytes are no description of a voice")
        return msgspec.json.decode(data, type=kind)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.__class__.__name__})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path.name}: {error}") from None


def _is_orpheus(folder: Path) -> bool:
    """By its vocabulary: Llama 3's 128256 pieces and 28684 of its own."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        return bool(config.get("model_type") == "llama" and config.get("vocab_size") == _ORPHEUS_VOCAB)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, AttributeError, RecursionError):
        return False


def _orpheus_file(folder: Path) -> _File:
    """What a snapshot of Orpheus would have written. The language stands in the repository's name: 3b-fr-ft-..."""
    found = re.search(r"3b-([a-z]{2})(?:_[a-z]{2})?-", str(folder))
    language = found[1] if found and found[1] in _ORPHEUS_VOICES else "en"
    return _File(
        family="orpheus",
        name="orpheus",
        voices=_ORPHEUS_VOICES[language].split(),
        audio=_ORPHEUS_AUDIO,
        prompt=_ORPHEUS_PROMPT,
        language=language,
        codec="codec" if (folder / "codec").is_dir() else "hubertsiuzdak/snac_24khz",
    )


def _from_file(folder: Path, file: _File) -> SpeechFormat:
    audio, family = file.audio, file.family
    if family not in _DEFAULT_SAMPLING:
        raise ModelLoadError(f"family: expected {', '.join(_DEFAULT_SAMPLING)}, got {family[:40]!r}")
    strides = audio.strides
    nested = all(a >= b and a % b == 0 for a, b in zip(strides, strides[1:], strict=False))
    if not strides or min(strides) < 1 or strides[0] > 64 or not nested:
        raise ModelLoadError(f"audio.strides: expected each a multiple of the next, got {strides[:8]}")
    if audio.order != "depth_first" or audio.size < 1 or min(audio.first, audio.end) < 0:
        raise ModelLoadError("audio: expected order depth_first, and size, first and end of codes")
    if not file.voices:
        raise ModelLoadError("voices: expected at least one")
    default = file.default_voice or file.voices[0]
    if default not in file.voices:
        raise ModelLoadError(f"default_voice: {default[:40]!r} is none of the voices")
    sample_rate, frame_samples = _of_codec(folder, file)
    common: dict[str, Any] = {
        "family": family,
        "name": file.name or folder.name,
        "voices": tuple(file.voices),
        "default_voice": default,
        "language": file.language,
        "first": audio.first,
        "size": audio.size,
        "strides": tuple(strides),
        "end": audio.end,
        "sampling": file.sampling or _DEFAULT_SAMPLING[family],
        "frame_samples": frame_samples,
        "sample_rate": sample_rate,
        "codec": file.codec,
    }
    if family == "motet-voice":
        return _letter_voice(file, common)
    if file.prompt is None:
        raise ModelLoadError("prompt: expected what stands before and after the text")
    common |= {"letters": None, "folder": folder}
    if family == "neutts":
        missing = [voice for voice in file.voices if voice not in file.references]
        if missing or not isinstance(file.prompt.before, str) or not isinstance(file.prompt.after, str):
            raise ModelLoadError(f"references: expected text and codes for {missing[:5]}, and prompt as text")
        if len(strides) != 1:
            raise ModelLoadError(f"audio.strides: expected one level, got {strides}")
        return ReferenceVoice(
            **common,
            max_chars=file.max_chars or 250,
            before=file.prompt.before,
            after=file.prompt.after,
            references=file.references,
            carry_s=file.carry_s or 0.0,
            trim_below=file.trim_below or 0.0,
        )
    if isinstance(file.prompt.before, str) or isinstance(file.prompt.after, str):
        raise ModelLoadError("prompt: expected ids before and after the text")
    return OrpheusVoice(
        **common,
        max_chars=file.max_chars or 300,  # a long sentence; well below the 45 s from which on it gets worse
        before=tuple(file.prompt.before),
        after=tuple(file.prompt.after),
        between=tuple(file.prompt.between),
        carry_s=12.0 if file.carry_s is None else file.carry_s,
        trim_below=0.01 if file.trim_below is None else file.trim_below,  # -40 dB: the noise before it speaks
    )


def _letter_voice(file: _File, common: dict[str, Any]) -> LetterVoice:
    text, phones, audio = file.text, file.phones, file.audio
    if text is None or phones is None or audio.start < 0:
        raise ModelLoadError("motet-voice: expected text, phones and audio.start")
    if len(file.voices) != 1:
        raise ModelLoadError("voices: a motet-voice speaks with one voice, its prompt names none")
    letters = (text.first, text.first + len(text.letters))
    names = (phones.first, phones.first + len(phones.names))
    special = {text.start, text.end, phones.start, audio.start, audio.end}
    crowded = len(special) < 5 or any(low <= index < high for index in special for low, high in (letters, names))
    if crowded or not text.letters or not phones.names or letters[1] > names[0] or names[1] > audio.first:
        raise ModelLoadError("the ids of letters, phones and codes must follow each other and not overlap")
    return LetterVoice(
        **common,
        letters=text.letters,
        max_chars=file.max_chars or 90,
        first_letter=text.first,
        text_start=text.start,
        text_end=text.end,
        phones=tuple(phones.names),
        first_phone=phones.first,
        phones_start=phones.start,
        codes_start=audio.start,
        phone_sampling=file.phone_sampling,
        carry_s=file.carry_s or 0.0,
        trim_below=file.trim_below or 0.0,
    )


class _Codec(msgspec.Struct, kw_only=True):
    """What matters here of a codec's config.json (SNAC's names)."""

    model_type: str = "snac"
    sampling_rate: int = SAMPLE_RATE
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    vq_strides: tuple[int, ...] = (4, 2, 1)
    codebook_size: int = 4096


def _of_codec(folder: Path, file: _File) -> tuple[int, int]:
    """Sample rate and samples of a frame, by the codec that lies in the voice's folder, else by SNAC at 24 kHz."""
    path = folder / file.codec / "config.json"
    codec = _read(path, _Codec) if path.is_file() else _Codec()
    if codec.model_type != "snac":
        raise ModelLoadError(f"codec: {codec.model_type[:40]!r} is not known here; codes of SNAC are")
    if path.is_file() and (codec.vq_strides != tuple(file.audio.strides) or codec.codebook_size != file.audio.size):
        raise ModelLoadError(
            f"audio: strides {file.audio.strides} and size {file.audio.size} are not the codec's: "
            f"{list(codec.vq_strides)} and {codec.codebook_size}"
        )
    if min(codec.sampling_rate, *codec.decoder_rates) < 1:
        raise ModelLoadError("codec: expected a sample rate and decoder rates above 0")
    return codec.sampling_rate, math.prod(codec.decoder_rates) * file.audio.strides[0]

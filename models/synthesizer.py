"""Voices without a language model: ids of sounds in, samples out, in one call. Torch-free.

What is read here are Piper's voices (VITS), which a user brings: `X.onnx` and `X.onnx.json` beside it. They run in onnxruntime,
an optional extra (`pip install motet[piper]`). The description says which ids a sound has and where sounds come from:

    phoneme_type "text"    characters, case-folded, canonically decomposed
    phoneme_type "espeak"  the IPA that the program espeak-ng writes. It is called where a user has installed it; none of it is
                           part of Motet.

The graph takes input [1, T] int64, input_lengths [1] int64, scales [3] fp32 (noise, length, noise of durations) and, of several
speakers, sid [1] int64; its first output is samples fp32. An utterance's prompt is the speaker's number, then the ids of
sounds as the voices were trained on: begin, pad, sound, pad, sound, pad, ..., end.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..engine.errors import InternalError, InvalidRequest, ModelLoadError
from .speech_format import SAMPLE_RATE, Phase, Sampling, SpeechFormat

SUFFIX = ".onnx"
EXTRA = "piper"
_MAX_JSON_BYTES = 4 << 20
_MAX_CHARS = 300  # of an utterance: some 20 s
_ESPEAK = "espeak-ng"
_ESPEAK_S = 10.0  # it takes milliseconds
_PAD, _BEGIN, _END = "_", "^", "$"
_CLAUSE_END = re.compile(r"([.,;:!?]+)(?=\s|$)")  # not within 3.5 or 10:30
_SWITCH = re.compile(r"\([a-z-]+\)")  # espeak-ng marks words of another language: (en)

Samples = NDArray[np.float32]


class Synthesizer(Protocol):
    """Turns the prompt of one utterance into samples. Called by one thread at a time."""

    sample_rate: int

    def synthesize(self, prompt: Sequence[int], *, noise: float = 1.0) -> Samples:
        """Samples fp32 [n] in [-1, 1]. `noise` scales the voice's own randomness; 0 makes the answer repeatable."""
        ...


# ------------------------------------------------------------------------------------------------------ the description


class _Audio(msgspec.Struct, kw_only=True):
    sample_rate: int = 22_050


class _Espeak(msgspec.Struct, kw_only=True):
    voice: str = "en-us"


class _Inference(msgspec.Struct, kw_only=True):
    noise_scale: float = 0.667
    length_scale: float = 1.0
    noise_w: float = 0.8


class _Language(msgspec.Struct, kw_only=True):
    code: str = ""


class Description(msgspec.Struct, kw_only=True):
    """`X.onnx.json`: the fields that matter here, in Piper's words."""

    phoneme_id_map: dict[str, list[int]]
    audio: _Audio = msgspec.field(default_factory=_Audio)
    espeak: _Espeak = msgspec.field(default_factory=_Espeak)
    inference: _Inference = msgspec.field(default_factory=_Inference)
    language: _Language = msgspec.field(default_factory=_Language)
    phoneme_type: str = "espeak"
    num_symbols: int = 256
    num_speakers: int = 1
    speaker_id_map: dict[str, int] = {}


def read_description(path: Path) -> Description:
    """The description of the voice at `path` (X.onnx). Raises ModelLoadError saying which field is wrong."""
    beside = path.with_name(path.name + ".json")
    try:
        data = beside.read_bytes()
        if len(data) > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{beside.name}: {len(data)} bytes are no description of a voice")
        found = msgspec.json.decode(data, type=Description)
    except OSError as error:
        raise ModelLoadError(f"{beside.name}: cannot be read ({error.__class__.__name__})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{beside.name}: {error}") from None
    wrong = _wrong(found)
    if wrong:
        raise ModelLoadError(f"{beside.name}: {wrong}")
    return found


def _wrong(found: Description) -> str:
    """What is wrong with a description, or nothing."""
    missing = [mark for mark in (_PAD, _BEGIN, _END) if not found.phoneme_id_map.get(mark)]
    if missing:
        return f"phoneme_id_map: expected ids of {missing}"
    ids = [index for ids in found.phoneme_id_map.values() for index in ids]
    if not (0 <= min(ids) and max(ids) < found.num_symbols):
        return f"phoneme_id_map: expected ids in [0, {found.num_symbols}), got {min(ids)} to {max(ids)}"
    if found.phoneme_type not in ("text", "espeak"):
        return f"phoneme_type: expected text or espeak, got {found.phoneme_type[:40]!r}"
    if not 4_000 <= found.audio.sample_rate <= 192_000:
        return f"audio.sample_rate: expected 4000 to 192000, got {found.audio.sample_rate}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9+_-]{0,39}", found.espeak.voice):
        return "espeak.voice: expected a voice's name"
    scales = (found.inference.noise_scale, found.inference.length_scale, found.inference.noise_w)
    if not all(math.isfinite(scale) and 0 <= scale <= 10 for scale in scales) or scales[1] == 0:
        return f"inference: expected scales in [0, 10], length_scale more than 0, got {list(scales)}"
    if found.num_speakers < 1 or any(not 0 <= n < found.num_speakers for n in found.speaker_id_map.values()):
        return f"speaker_id_map: expected numbers in [0, {found.num_speakers})"
    return ""


# ---------------------------------------------------------------------------------------------------------- the text


@dataclass(frozen=True, kw_only=True)
class SynthesizerFormat(SpeechFormat):
    """How text becomes a prompt of such a voice. What a `SpeechFormat` says of codes says nothing here: there are none."""

    description: Description
    speakers: tuple[int, ...]  # number of each of `voices`

    def prompt(self, text: str, voice: str | None = None) -> list[int]:
        """The speaker's number and the ids of an utterance. Blocks for some milliseconds where espeak-ng is asked.

        Raises InvalidRequest for what it cannot speak, InternalError where espeak-ng fails.
        """
        speaker = self.speakers[self.voices.index(self.voice(voice))]
        self.check_text(text)
        table = self.description.phoneme_id_map
        pad = table[_PAD]
        sounds = [table[sound] for sound in self.sounds(text) if sound in table and sound not in (_PAD, _BEGIN, _END)]
        if not sounds:
            raise InvalidRequest(f"input: {self.name} has no sound for this text", param="input")
        ids = [*table[_BEGIN], *pad]
        for sound in sounds:
            ids += [*sound, *pad]
        return [speaker, *ids, *table[_END]]

    def sounds(self, text: str) -> list[str]:
        """Names of sounds, in order; those that the voice does not know are among them."""
        if self.description.phoneme_type == "text":
            return list(unicodedata.normalize("NFD", text.casefold()))
        voice, found = self.description.espeak.voice, []
        clauses = _CLAUSE_END.split(text)  # words, their mark, words, ...
        for words, mark in zip(clauses[::2], [*clauses[1::2], ""], strict=True):
            if words.strip():
                found += list(unicodedata.normalize("NFD", _espeak(words.strip(), voice)))
            if mark:
                found += [mark[0], " "]  # espeak-ng leaves out the marks that end a clause, the voices know them
        return found[:-1] if found and found[-1] == " " else found

    @property
    def phases(self) -> tuple[Phase, ...]:
        return ()

    def max_seconds(self, prompt: Sequence[int]) -> float:
        return 4.0 + 0.2 * len(prompt)  # a sound and its pad: slow speech has 8 sounds a second


def load_synthesizer_format(path: Path) -> SynthesizerFormat:
    """The format of the voice at `path` (X.onnx). Raises ModelLoadError, also where it needs espeak-ng and there is none."""
    found = read_description(path)
    if found.phoneme_type == "espeak" and shutil.which(_ESPEAK) is None:
        raise ModelLoadError(
            f"{path.name}: this voice reads IPA; it needs the program {_ESPEAK} on the PATH (Debian: apt install {_ESPEAK})"
        )
    names = found.speaker_id_map or (
        {path.stem: 0} if found.num_speakers == 1 else {str(n): n for n in range(found.num_speakers)}
    )
    code = found.language.code or found.espeak.voice
    return SynthesizerFormat(
        family="piper",
        name=path.stem,
        voices=tuple(names),
        default_voice=min(names, key=lambda name: names[name]),
        language=re.split(r"[-_]", code)[0].lower(),
        letters=None,
        max_chars=_MAX_CHARS,
        first=0,
        size=1,
        strides=(1,),
        end=0,
        sampling=Sampling(),
        frame_samples=SAMPLE_RATE,
        codec="",
        sample_rate=SAMPLE_RATE,  # of what leaves the engine; the graph's own rate is the engine's business
        description=found,
        speakers=tuple(names.values()),
    )


def _espeak(clause: str, voice: str) -> str:
    """IPA of a clause, from a child process."""
    try:
        done = subprocess.run(
            [_ESPEAK, "-q", "--ipa", "-v", voice, "--stdin"],
            input=clause.encode(),
            capture_output=True,
            timeout=_ESPEAK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InternalError(f"{_ESPEAK} gave no answer within {_ESPEAK_S:.0f} s") from None
    except OSError as error:
        raise InternalError(f"{_ESPEAK} cannot be run ({error.__class__.__name__})") from None
    if done.returncode != 0:
        raise InternalError(f"{_ESPEAK} failed with status {done.returncode}")
    return " ".join(_SWITCH.sub("", done.stdout.decode("utf-8", "replace")).split())


# --------------------------------------------------------------------------------------------------------- the graph


class PiperSynthesizer:
    """A voice in an onnxruntime session."""

    def __init__(self, session: Any, description: Description) -> None:
        """`session` has onnxruntime's `run` and `get_inputs`. Raises ModelLoadError where the graph takes other inputs."""
        self.sample_rate = description.audio.sample_rate
        self._session = session
        self._description = description
        names = {item.name for item in session.get_inputs()}
        wanted = {"input", "input_lengths", "scales"}
        self._takes_speaker = "sid" in names
        if names - {"sid"} != wanted or (description.num_speakers > 1 and not self._takes_speaker):
            raise ModelLoadError(
                f"expected a graph with inputs {sorted(wanted)} (sid of speakers), got {sorted(names)}"
            )

    @classmethod
    def load(cls, path: Path, *, threads: int = 0) -> PiperSynthesizer:
        """The voice at `path` (X.onnx) on the CPU. `threads` 0: onnxruntime's own choice. Raises ModelLoadError."""
        description = read_description(path)
        try:
            import onnxruntime
        except ImportError:
            raise ModelLoadError(
                f"{path.name}: voices of ONNX need onnxruntime, the extra {EXTRA!r}: pip install 'motet[{EXTRA}]'"
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        # Between two calls its threads sleep: the cores are others' then.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # a stranger's file; onnxruntime has a class for each fault
            raise ModelLoadError(f"{path.name}: not a usable ONNX graph ({error.__class__.__name__})") from None
        return cls(session, description)

    @cached_property
    def _scales(self) -> NDArray[np.float32]:
        own = self._description.inference
        return np.array([own.noise_scale, own.length_scale, own.noise_w], np.float32)

    def synthesize(self, prompt: Sequence[int], *, noise: float = 1.0) -> Samples:
        """See `Synthesizer`. Raises InternalError where the graph gives something other than finite samples."""
        ids = np.array([prompt[1:]], np.int64)
        inputs: dict[str, Any] = {
            "input": ids,
            "input_lengths": np.array([ids.shape[1]], np.int64),
            "scales": self._scales * np.array([noise, 1.0, noise], np.float32),
        }
        if self._takes_speaker:
            inputs["sid"] = np.array([prompt[0]], np.int64)
        samples = np.asarray(self._session.run(None, inputs)[0], np.float32).reshape(-1)
        if not np.isfinite(samples).all():
            raise InternalError("the voice computed NaN for this utterance", code="nan_samples")
        return samples.clip(-1.0, 1.0)

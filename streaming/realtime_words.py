"""Words of the Realtime protocol as far as transcription needs them: the session's settings in both dialects.

The GA dialect nests (`session.audio.input...`), the beta dialect is flat (`input_audio_format`...). Both read into one
`Settings`, and both can be shown. An update names what changes; null clears; what is unknown or unsupported is refused
by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from ..engine.errors import InvalidRequest, UnsupportedParameter
from ..engine.types import TranscribeOptions
from .config import DEFAULT_MODEL
from .exchange import named_error
from .languages import language_code
from .live_stream import Encoding

Delay: TypeAlias = Literal["minimal", "low", "medium", "high", "xhigh"]
_PARTIAL_S = {"minimal": 0.25, "low": 0.5, "medium": 1.0, "high": 2.0, "xhigh": 4.0}
_BETA_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_ENCODINGS: dict[str, Encoding] = {"audio/pcm": "s16", "audio/pcmu": "ulaw", "audio/pcma": "alaw"}


class ClientEvent(Struct, kw_only=True):
    """Any event of a client, as far as the kinds we know need its fields."""

    type: str
    event_id: str | None = None
    audio: str | None = None
    session: Raw = Raw()
    item_id: str | None = None


class Format(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: Annotated[int, Meta(ge=8000, le=48000)] | None = None


class TranscriptionUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None | UnsetType = UNSET
    language: str | None | UnsetType = UNSET
    languages: list[str] | None | UnsetType = UNSET
    prompt: Annotated[str, Meta(max_length=10_000)] | None | UnsetType = UNSET
    keywords: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=200)] | None | UnsetType = UNSET
    delay: Delay | None | UnsetType = UNSET


class VADUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str = "server_vad"
    threshold: Annotated[float, Meta(gt=0, lt=1)] | None = None
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=2000)] | None = None
    silence_duration_ms: Annotated[int, Meta(ge=32, le=5000)] | None = None
    create_response: bool | None = None  # nothing answers in a transcription session: without meaning here
    interrupt_response: bool | None = None
    idle_timeout_ms: Any = None
    eagerness: Any = None


class InputUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    format: Format | None | UnsetType = UNSET
    noise_reduction: Any = None
    transcription: TranscriptionUpdate | None | UnsetType = UNSET
    turn_detection: VADUpdate | None | UnsetType = UNSET


class AudioUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    input: InputUpdate | None = None


class SessionUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    """GA: `session` of session.update. What the server itself has sent may come back."""

    type: str = "transcription"
    audio: AudioUpdate | None = None
    include: list[str] | None = None
    id: str | None = None
    object: str | None = None
    expires_at: int | None = None


class BetaUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    """Beta: `session` of transcription_session.update."""

    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | UnsetType = UNSET
    input_audio_transcription: TranscriptionUpdate | None | UnsetType = UNSET
    turn_detection: VADUpdate | None | UnsetType = UNSET
    input_audio_noise_reduction: Any = None
    include: list[str] | None = None
    modalities: list[str] | None = None
    id: str | None = None
    object: str | None = None
    expires_at: int | None = None


class VAD(Struct, frozen=True, kw_only=True):
    type: Literal["server_vad"] = "server_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


class Settings(Struct, frozen=True, kw_only=True):
    """What a transcription session is set to."""

    model: str = DEFAULT_MODEL
    language: str | None = None
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    delay: Delay | None = None
    format: str = "audio/pcm"
    rate: int = 24_000
    vad: VAD | None = VAD()  # None: the client commits

    @property
    def encoding(self) -> Encoding:
        return _ENCODINGS[self.format]

    def options(self) -> TranscribeOptions:
        vad = self.vad or VAD()
        return TranscribeOptions(
            language=self.language,
            prompt=self.prompt,
            hotwords=", ".join(self.keywords),
            vad=self.vad is not None,
            vad_threshold=vad.threshold,
            end_silence_s=vad.silence_duration_ms / 1e3,
            speech_pad_s=vad.prefix_padding_ms / 1e3,
            partial_s=_PARTIAL_S[self.delay or "medium"],
        )

    def updated(self, raw: Raw, *, beta: bool) -> Settings:
        """With a client's update merged in. Raises InvalidRequest and UnsupportedParameter that name the field."""
        if not bytes(raw):
            raise InvalidRequest("missing required field 'session'", param="session", code="missing_parameter")
        try:
            if beta:
                return self._with_beta(msgspec.json.decode(raw, type=BetaUpdate))
            return self._with(msgspec.json.decode(raw, type=SessionUpdate))
        except msgspec.ValidationError as error:
            named = named_error(error)
            named.param = f"session.{named.param}" if named.param else "session"
            raise named from None

    def _with(self, update: SessionUpdate) -> Settings:
        if update.type != "transcription":
            raise InvalidRequest(
                f"session.type: expected 'transcription' in this session, got {update.type[:40]!r}",
                param="session.type",
            )
        _refuse_include(update.include)
        wanted = update.audio.input if update.audio is not None and update.audio.input is not None else InputUpdate()
        if wanted.noise_reduction is not None:
            raise _unsupported("session.audio.input.noise_reduction")
        settings = self
        if wanted.format is None:
            settings = replace(settings, format="audio/pcm", rate=24_000)
        elif wanted.format is not UNSET:
            settings = settings._with_format(wanted.format.type, wanted.format.rate)
        settings = settings._with_transcription(wanted.transcription, "session.audio.input.transcription")
        return settings._with_vad(wanted.turn_detection, "session.audio.input.turn_detection")

    def _with_beta(self, update: BetaUpdate) -> Settings:
        _refuse_include(update.include)
        if update.input_audio_noise_reduction is not None:
            raise _unsupported("session.input_audio_noise_reduction")
        settings = self
        if update.input_audio_format is not UNSET:
            settings = settings._with_format(_BETA_FORMATS[update.input_audio_format], None)
        settings = settings._with_transcription(update.input_audio_transcription, "session.input_audio_transcription")
        return settings._with_vad(update.turn_detection, "session.turn_detection")

    def _with_format(self, kind: str, rate: int | None) -> Settings:
        if kind == "audio/pcm":
            return replace(self, format=kind, rate=rate or 24_000)
        if rate not in (None, 8000):
            raise InvalidRequest(
                f"rate: G.711 has 8000 samples per second, got {rate}", param="session.audio.input.format.rate"
            )
        return replace(self, format=kind, rate=8000)

    def _with_transcription(self, update: TranscriptionUpdate | None | UnsetType, path: str) -> Settings:
        if update is UNSET:
            return self
        if update is None:
            return replace(self, model=DEFAULT_MODEL, language=None, prompt="", keywords=(), delay=None)
        changes: dict[str, Any] = {}
        if update.model is not UNSET:
            changes["model"] = update.model or DEFAULT_MODEL
        if update.languages:
            if len(update.languages) > 1:
                raise _unsupported(f"{path}.languages")
            changes["language"] = language_code(update.languages[0], f"{path}.languages")
        if update.language is not UNSET:
            changes["language"] = language_code(update.language, f"{path}.language") if update.language else None
        if update.prompt is not UNSET:
            changes["prompt"] = update.prompt or ""
        if update.keywords is not UNSET:
            changes["keywords"] = tuple(update.keywords or ())
        if update.delay is not UNSET:
            changes["delay"] = update.delay
        return replace(self, **changes)

    def _with_vad(self, update: VADUpdate | None | UnsetType, path: str) -> Settings:
        if update is UNSET:
            return self
        if update is None:
            return replace(self, vad=None)
        if update.type != "server_vad":
            raise UnsupportedParameter(
                f"{path}.type: expected 'server_vad' or null for turn_detection, got {update.type[:40]!r}",
                param=f"{path}.type",
            )
        for name in ("idle_timeout_ms", "eagerness"):
            if getattr(update, name) is not None:
                raise _unsupported(f"{path}.{name}")
        names = ("threshold", "prefix_padding_ms", "silence_duration_ms")
        changes = {name: value for name in names if (value := getattr(update, name)) is not None}
        return replace(self, vad=replace(self.vad or VAD(), **changes))

    def shown(self, session_id: str, expires_at: int, *, beta: bool) -> dict[str, Any]:
        """The `session` of session.created and session.updated."""
        transcription: dict[str, Any] = {"model": self.model, "language": self.language, "prompt": self.prompt}
        if self.keywords:
            transcription["keywords"] = self.keywords
        if self.delay is not None:
            transcription["delay"] = self.delay
        head = {"id": session_id, "object": "realtime.transcription_session", "expires_at": expires_at}
        if beta:
            name = next(name for name, kind in _BETA_FORMATS.items() if kind == self.format)
            return {
                **head,
                "input_audio_format": name,
                "input_audio_transcription": transcription,
                "turn_detection": self.vad,
                "input_audio_noise_reduction": None,
                "include": None,
            }
        kind = {"type": self.format, "rate": self.rate} if self.format == "audio/pcm" else {"type": self.format}
        return {
            **head,
            "type": "transcription",
            "audio": {
                "input": {
                    "format": kind,
                    "noise_reduction": None,
                    "transcription": transcription,
                    "turn_detection": self.vad,
                }
            },
            "include": None,
        }


def _refuse_include(include: list[str] | None) -> None:
    if include:
        raise _unsupported("session.include")


def _unsupported(path: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{path!r} is not supported by this server", param=path)

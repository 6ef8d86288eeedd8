"""Model names: a table to read. Packaged models come from the entry-point group `motet.models`.

Knows names, files and licences. Does not open weights and never imports torch.

A name is, in this order: a registered id, a `.gguf` or `.onnx` file, a local directory, a hub id "owner/name" (the only kind that
is ever downloaded).
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..engine.errors import InvalidRequest, ModelLoadError, ModelNotFound

ENTRY_POINTS = "motet.models"
# Kinds that no request can name: other models load them when they need them.
PARTS = frozenset({"speaker"})
_MAX_NAME = 512
# Two parts; each begins with a letter or digit, so that neither "." nor ".." nor an option can be one.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# What is fetched of a hub repository: never pickles, never code.
# `model.bin` by this very name is CTranslate2's; what it holds is checked before it is read, and never unpickled.
HUB_PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "model.bin", "vocabulary.txt")
# Of a repository that has model_index.json (diffusers' layout): its parts' folders only. Beside them lie the same weights again,
# as one file for other programs, in other precisions, or as ONNX.
PICTURE_PATTERNS = (
    "model_index.json",
    *(
        f"{folder}/{file}"
        for folder in ("transformer", "vae", "text_encoder*", "tokenizer*", "scheduler")
        for file in ("*.safetensors", "*.json", "merges.txt", "spiece.model")
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that can be named. `locate()` gives its file or directory, or ModelNotFound saying what to install."""

    id: str
    kind: str  # "llm", "asr", "tts", ...; or one of PARTS
    locate: Callable[[], Path]
    licence: str
    summary: str
    num_parameters: int
    download_mb: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A name that was found. `id` is what requests call the model; `path` is a file or a directory."""

    id: str
    kind: str
    path: Path


@lru_cache(maxsize=1)
def _packaged() -> tuple[ModelSpec, ...]:
    specs: dict[str, ModelSpec] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        try:
            found = list(point.load()())
        except Exception as error:  # another distribution's code: it must not take our start with it
            raise ModelLoadError(
                f"the models of package entry {point.name[:60]!r} cannot be listed: {error.__class__.__name__}"
            ) from error
        for spec in found:
            specs.setdefault(spec.id, spec)
    return tuple(specs.values())


_registered: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> None:
    """Add a model to this process; it comes before a packaged one of the same id."""
    _registered[spec.id] = spec


def unregister(model_id: str) -> None:
    """Take back `register`; unknown ids are ignored."""
    _registered.pop(model_id, None)


def installed() -> list[ModelSpec]:
    """All models that have a name here: those of this process, then packaged ones, by entry point and their order."""
    return [*_registered.values(), *(spec for spec in _packaged() if spec.id not in _registered)]


def find(name: str) -> ModelSpec | None:
    """The registered model called `name`, or None."""
    return next((spec for spec in installed() if spec.id == name), None)


def resolve(name: str) -> ResolvedModel:
    """Find a model by name, downloading only when the name is a hub id. ModelNotFound says what was looked for."""
    _check_name(name)
    if spec := find(name):
        return ResolvedModel(id=spec.id, kind=spec.kind, path=spec.locate())
    path = Path(name).expanduser()
    try:
        if path.suffix == ".gguf":
            if path.is_file():
                return ResolvedModel(id=path.stem, kind="llm", path=path)
            raise ModelNotFound(f"no GGUF file at {name[:200]!r}")
        if path.suffix == ".onnx":
            if path.is_file() and path.with_name(path.name + ".json").is_file():
                return ResolvedModel(id=path.stem, kind="tts", path=path.resolve())
            raise ModelNotFound(f"a voice of ONNX is two files, X.onnx and X.onnx.json: not both are at {name[:200]!r}")
        if path.is_dir():
            path = path.resolve()
            return ResolvedModel(id=path.name, kind=_kind_of(path), path=path)
    except OSError as error:
        raise ModelNotFound(f"{name[:200]!r} cannot be opened ({error.__class__.__name__})") from None
    if _HUB_ID.fullmatch(name) and ".." not in name:
        path = _download(name)
        return ResolvedModel(id=name, kind=_kind_of(path), path=path)
    known = ", ".join(spec.id for spec in installed()) or "none"
    raise ModelNotFound(
        f"no model {name[:200]!r}: not an installed model (installed: {known}), a .gguf or .onnx file, "
        'a directory or a hub id "owner/name"'
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise InvalidRequest(f"a model name has 1 to {_MAX_NAME} characters", param="model")
    if not name.isprintable() or name != name.strip():
        raise InvalidRequest("a model name has printable characters and no space around it", param="model")


def _kind_of(path: Path) -> str:
    """What a directory's files say it is; "llm" unless they name another kind that we know."""
    if _is_ctranslate2_whisper(path / "model.bin"):
        return "asr"
    if (path / "motet_image.json").is_file() or (path / "model_index.json").is_file():  # ours; that of diffusers
        return "image"
    from .speech_format import is_voice  # reads tokenizers: not for those who only list names

    if is_voice(path):
        return "tts"
    try:
        config = json.loads((path / "config.json").read_bytes())
        names = config.get("architectures") or []
    except (OSError, ValueError, AttributeError, RecursionError):
        return "llm"
    return "asr" if any("Whisper" in str(name) for name in names) else "llm"


def _is_ctranslate2_whisper(file: Path) -> bool:
    """Whether a CTranslate2 file holds Whisper: its version, then the length and name of what it holds."""
    try:
        with open(file, "rb") as opened:
            return opened.read(18)[6:] == b"WhisperSpec\0"
    except OSError:
        return False


def _download(hub_id: str) -> Path:
    """The snapshot of a hub repository, from the local cache when offline (HF_HUB_OFFLINE) or unreachable."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        # One small file says first which layout it is.
        found = Path(snapshot_download(hub_id, allow_patterns=["model_index.json"]))
        if not (found / "model_index.json").is_file():
            return Path(snapshot_download(hub_id, allow_patterns=list(HUB_PATTERNS)))
        return Path(
            snapshot_download(hub_id, allow_patterns=list(PICTURE_PATTERNS), ignore_patterns=["*.fp16*", "*/*/*"])
        )
    except GatedRepoError:
        raise ModelNotFound(f"hub model {hub_id!r} wants its licence accepted and a token (HF_TOKEN)") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(f"no public model {hub_id!r} on the hub (private ones want HF_TOKEN)") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise ModelNotFound(
            f"hub model {hub_id!r} is not in the local cache, and the hub is switched off "
            "(HF_HUB_OFFLINE) or cannot be reached"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFound(f"hub model {hub_id!r} cannot be fetched ({error.__class__.__name__})") from None

"""From a name on disk to a config and a source of weights: the door of every model constructor.

    path = resolve("smollm2-135m-instruct").path
    config = read_config(path)            # a transformers-style config dict
    source = open_weights(path)           # tensors by Hugging Face parameter name, read when asked for

`path` is a directory (config.json + safetensors), a `.safetensors` file beside its config.json, or a `.gguf` file.
Nothing is unpickled and no code of a model is run. Unusable files are `ModelLoadError`s that name them by base name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..engine.errors import ModelLoadError, ModelNotFound
from ..kernels.linear import LinearWeight
from .gguf import GGUFFile
from .gguf_families import gguf_config
from .gguf_source import GGUFSource
from .registry import ResolvedModel, resolve
from .safetensors_source import open_safetensors

__all__ = ["ResolvedModel", "WeightSource", "check_names", "eos_token_ids", "open_weights", "read_config", "resolve"]

_MAX_JSON_BYTES = 16 << 20
_SHOWN = 20


class WeightSource(Protocol):
    """Tensors by Hugging Face parameter name. Quantized matrices come as `LinearWeight`, everything else as Tensor.

    Both may be views of a mapped file: copy before writing.
    """

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def get(self, name: str) -> Tensor | LinearWeight: ...
    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> Tensor | LinearWeight:
        """Elements lo..hi of dimension `dim`. Quantized columns not aligned to their group come as an fp32 Tensor."""
        ...


def open_weights(path: Path | str, *, keep_quantized: bool = True) -> WeightSource:
    """The weights at `path`. `keep_quantized=False` has GGUF's quantized matrices dequantized to fp32 Tensors."""
    path = _existing(path)
    if path.suffix == ".gguf":
        return GGUFSource(path, keep_quantized=keep_quantized)
    return open_safetensors(path)


def read_config(path: Path | str) -> dict[str, Any]:
    """The `transformers`-style config of the model at `path`: its config.json, or a translation of GGUF metadata."""
    path = _existing(path)
    if path.suffix == ".gguf":
        return gguf_config(GGUFFile(path))
    config = _read_json(_folder(path) / "config.json")
    if config is None:
        raise ModelLoadError(f"{path.name}: no config.json here")
    if "quantization_config" in config:
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ModelLoadError(
            f"{path.name}: weights quantized by {str(method)[:40]!r} are not supported; "
            "expected float safetensors or a GGUF file"
        )
    return config


def eos_token_ids(path: Path | str) -> tuple[int, ...]:
    """Ids that end an answer: from generation_config.json, else config.json, or GGUF metadata; () when none is told."""
    path = _existing(path)
    if path.suffix == ".gguf":
        found = gguf_config(GGUFFile(path)).get("eos_token_id")
    else:
        generation = _read_json(_folder(path) / "generation_config.json") or {}
        found = generation.get("eos_token_id")
        if found is None:
            config = read_config(path)
            text = config.get("text_config")
            found = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ModelLoadError(f"{path.name}: eos_token_id is {str(found)[:60]!r}, expected an id or a list of ids")
    return tuple(dict.fromkeys(ids))


def check_names(expected: Iterable[str], available: Iterable[str], *, optional: Iterable[str] = ()) -> None:
    """ModelLoadError with both lists unless `available` holds all of `expected` and nothing but them and `optional`."""
    want, have = set(expected), set(available)
    missing, unexpected = sorted(want - have), sorted(have - want - set(optional))
    parts = [
        f"{len(names)} {word}: {', '.join(n[:120] for n in names[:_SHOWN])}" + ", ..." * (len(names) > _SHOWN)
        for word, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if parts:
        raise ModelLoadError(f"the weights do not fit the model; {'; '.join(parts)}")


def _existing(path: Path | str) -> Path:
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"{path.name}: no such file or directory")
    return path


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelLoadError(f"{path.name}: larger than {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{path.name}: not valid JSON") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name}: expected a JSON object")
    return value

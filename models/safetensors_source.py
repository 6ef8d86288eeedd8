"""Weights from safetensors files: one file, a sharded set with its index, or a directory of either.

Tensors and slices are read from the mapped file when they are asked for. Knows nothing of models or names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..engine.errors import ModelLoadError

_MAX_INDEX_BYTES = 64 << 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsSource:
    """A `WeightSource` (models/loader.py) over one or more safetensors files."""

    def __init__(self, files: list[Path], index: dict[str, str] | None = None) -> None:
        """`index` maps a tensor's name to a base name among `files`; None: each file says itself what it holds."""
        self._files: dict[str, Any] = {}
        self._place: dict[str, str] = {}
        for path in files:
            try:
                handle = safe_open(str(path), framework="pt")
                held = list(handle.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelLoadError(f"{path.name}: not a usable safetensors file: {_reason(error)}") from None
            self._files[path.name] = handle
            for name in held:
                if index is None and name in self._place:
                    raise ModelLoadError(f"the tensor {name[:80]!r} is in {self._place[name]} and in {path.name}")
                self._place[name] = path.name
        if index is not None:
            lost = sorted(name for name, file in index.items() if self._place.get(name) != file)
            if lost:
                raise ModelLoadError(
                    f"{len(lost)} tensors of the index are not in their file, first {lost[0][:80]!r} "
                    f"in {index[lost[0]][:80]}"
                )

    def names(self) -> set[str]:
        return set(self._place)

    def _handle(self, name: str) -> Any:
        if name not in self._place:
            raise ModelLoadError(f"the weights hold no tensor named {name[:120]!r}")
        return self._files[self._place[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        handle = self._handle(name)
        try:
            return self._checked(name, handle.get_tensor(name))
        except SafetensorError as error:
            raise ModelLoadError(f"{self._place[name]}: tensor {name[:80]!r}: {_reason(error)}") from None

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> Tensor:
        part = self._handle(name).get_slice(name)
        shape = part.get_shape()
        if not 0 <= dim < min(len(shape), 3) or not 0 <= lo <= hi <= shape[dim]:
            raise ModelLoadError(f"tensor {name[:80]!r} of shape {shape} has no slice {lo}:{hi} in dimension {dim}")
        cut = (slice(None),) * dim + (slice(lo, hi),)
        return self._checked(name, part[cut])

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{self._place[name]}: tensor {name[:80]!r} is {tensor.dtype}; expected float32, bfloat16 or float16"
            )
        return tensor


def _reason(error: Exception) -> str:
    return str(error)[:200] if isinstance(error, SafetensorError) else error.__class__.__name__


def open_safetensors(path: Path) -> SafetensorsSource:
    """A `.safetensors` file, or a directory with `model.safetensors(.index.json)` or any number of such files."""
    if path.is_file():
        return SafetensorsSource([path])
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        index = _read_index(index_path)
        files = sorted(set(index.values()))
        missing = [file for file in files if not (path / file).is_file()]
        if missing:
            raise ModelLoadError(f"{len(missing)} of {len(files)} weight files are missing, first {missing[0][:120]}")
        return SafetensorsSource([path / file for file in files], index)
    single = path / "model.safetensors"
    files_here = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files_here:
        raise ModelLoadError(f"{path.name}: no *.safetensors here (pickled weights, .bin and .pt, are not read)")
    return SafetensorsSource(files_here)


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise ModelLoadError(f"{path.name}: larger than {_MAX_INDEX_BYTES} bytes")
    try:
        index = json.loads(path.read_bytes())["weight_map"]
        assert isinstance(index, dict)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise ModelLoadError(f"{path.name}: expected a JSON object with a weight_map") from None
    for name, file in index.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or file != Path(file).name:
            raise ModelLoadError(
                f"{path.name}: {name[:80]!r} lies in {str(file)[:80]!r}; expected a plain *.safetensors name"
            )
    return index

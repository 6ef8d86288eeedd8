"""Weights out of an ONNX file: the initializers of its graph, read as data; nothing of the graph is run.

Knows the protobuf wire format and the few fields of ModelProto, GraphProto and TensorProto that hold tensors. Lengths
found in the file are compared with the bytes that remain; a damaged file gives `ModelLoadError` with its base name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..engine.errors import ModelLoadError

_MAX_BYTES = 64 << 20  # small networks only: the file is read whole
_GRAPH, _INITIALIZER = 7, 5
_DIMS, _TYPE, _NAME, _RAW = 1, 2, 8, 9
_FLOAT32 = 1


def read_onnx_weights(path: Path) -> dict[str, Tensor]:
    """Every float32 initializer with raw data of the graph, by its name. Others are passed over."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelLoadError(f"{path.name}: larger than the {_MAX_BYTES >> 20} MB that are read of an ONNX file")
        data = memoryview(path.read_bytes())
        weights = {}
        for graph in _messages(data, _GRAPH):
            for tensor in _messages(graph, _INITIALIZER):
                if found := _tensor(tensor):
                    weights[found[0]] = found[1]
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read ({error.__class__.__name__})") from None
    except (ValueError, IndexError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path.name}: not a usable ONNX file: {error}") from None
    if not weights:
        raise ModelLoadError(f"{path.name}: no float32 tensors in it")
    return weights


def _tensor(message: memoryview) -> tuple[str, Tensor] | None:
    """Name and tensor of a TensorProto, or None when it is not float32 in raw form."""
    dims: list[int] = []
    kind, name, raw = 0, "", None
    for field, value in _fields(message):
        if isinstance(value, int):
            if field == _DIMS:
                dims.append(value)
            elif field == _TYPE:
                kind = value
        elif field == _DIMS:  # packed
            at = 0
            while at < len(value):
                size, at = _varint(value, at)
                dims.append(size)
        elif field == _NAME:
            name = str(value, "utf-8")
        elif field == _RAW:
            raw = value
    if kind != _FLOAT32 or raw is None:
        return None
    if len(dims) > 8 or math.prod(dims) * 4 != len(raw):
        raise ValueError(f"tensor {name[:80]!r} has {len(raw)} bytes, not those of shape {dims[:8]}")
    return name, torch.frombuffer(bytearray(raw), dtype=torch.float32).view(dims)


def _messages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    for field, value in _fields(data):
        if field == wanted and not isinstance(value, int):
            yield value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, number or bytes) of a message; fixed-width fields come as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case wire:
                raise ValueError(f"unknown wire type {wire}")
        if size > len(data) - at:
            raise ValueError("a field is longer than the file")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")

"""The GGUF container: read from an mmap with numpy alone, bounded by the file's own size, and its block formats undone.

Knows bytes: header, metadata, tensor table, block types. Does not know models (models/gguf_families.py) and never
imports torch, so that the server process may read a tokenizer out of a GGUF. Every length found in the file is compared
with the bytes that remain before anything is allocated; a damaged file gives `ModelLoadError` with its base name.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import ModelLoadError

_MAX_KEY_BYTES = 65535  # of the specification
_MAX_NAME_BYTES = 1024  # the specification says 64; some writers exceed it
_MAX_DIMS = 4
_MAX_NESTING = 4  # arrays of arrays
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class BlockType:
    """How a tensor's elements are grouped: `size` elements along the last axis take `num_bytes` bytes."""

    name: str
    size: int
    num_bytes: int


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
# Named only to say clearly what a file holds that cannot be read.
_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is outermost first (the file's order reversed); `offset` is absolute."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF, version 2 or 3, little-endian. `metadata` holds Python values; arrays are lists.

    The mapping is private (copy on write) so that arrays over it count as writable; nobody writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"{path.name}: cannot be opened ({error.__class__.__name__})") from None
        self._size = len(self._map)
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, RecursionError, MemoryError, OverflowError) as error:
            raise self._bad(f"damaged near byte {self._at} ({error.__class__.__name__})") from None

    # ------------------------------------------------------------------------------------------------------- parsing

    def _bad(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path.name}: not a usable GGUF file: {what}")

    def _number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._map, self._at)[0]
        self._at += struct.calcsize("<" + code)
        return value

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._at:
            left = self._size - self._at
            raise self._bad(f"{what} wants {num_bytes} bytes at byte {self._at}, the file has {left} left")

    def _bytes(self, limit: int, what: str) -> bytes:
        length = self._number("Q")
        if length > limit:
            raise self._bad(f"{what} of {length} bytes at byte {self._at}; at most {limit} are allowed")
        self._need(length, what)
        value = self._map[self._at : self._at + length]
        self._at += length
        return value

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary has 50,000 to 250,000 of these."""
        data, at, size = self._map, self._at, self._size
        unpack = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > size:
                self._at = start
                raise self._bad(f"a string reaches {at - size} bytes past the end of the file")
            # Token strings may hold bytes that are no UTF-8; they must survive, not fail the load.
            out.append(data[start:at].decode("utf-8", "surrogateescape"))
        self._at = at
        return out

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._bytes(self._size, "a string").decode("utf-8", "surrogateescape")
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self._bad(f"value type {kind} at byte {self._at} is unknown or nested too deep")
        item, count = self._number("I"), self._number("Q")
        width = struct.calcsize("<" + _SCALARS[item]) if item in _SCALARS else 8 if item == _STRING else 12
        self._need(count * width, "an array")
        if item in _SCALARS:
            raw = self._map[self._at : self._at + count * width]
            self._at += count * width
            return np.frombuffer(raw, np.dtype("<" + _SCALARS[item])).tolist()
        if item == _STRING:
            return self._strings(count)
        return [self._value(item, depth + 1) for _ in range(count)]

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise self._bad("it does not begin with the letters GGUF")
        self._at = 4
        self.version: int = self._number("I")
        if self.version not in (2, 3):
            raise self._bad(f"version {self.version}, expected 2 or 3 in little-endian order")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        self._need(num_keys * 13 + num_tensors * 24, "the header")  # the least an entry can take
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._bytes(_MAX_KEY_BYTES, "a key").decode("utf-8")
            if key in self.metadata:
                raise self._bad(f"the key {key[:80]!r} comes twice")
            self.metadata[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment is {alignment!r}, expected a power of two from 8")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in entries:
            self._add_tensor(name, kind, shape, start + offset, alignment)

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._bytes(_MAX_NAME_BYTES, "a tensor name").decode("utf-8")
        num_dims = self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._bad(f"tensor {name[:80]!r} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
        return name, self._number("I"), shape, self._number("Q")

    def _add_tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int, alignment: int) -> None:
        label = name[:80]
        if kind not in TYPES:
            raise self._bad(
                f"tensor {label!r} has type {_OTHER_TYPES.get(kind, kind)}; "
                f"readable are {', '.join(t.name for t in TYPES.values())}"
            )
        block = TYPES[kind]
        if name in self.tensors:
            raise self._bad(f"the tensor {label!r} comes twice")
        if 0 in shape or shape[-1] % block.size:
            raise self._bad(f"tensor {label!r} of type {block.name} has shape {list(shape)}")
        count = 1
        for extent in shape:
            count *= extent
        num_bytes = count // block.size * block.num_bytes
        if offset % alignment or offset + num_bytes > self._size:
            raise self._bad(
                f"truncated or damaged: tensor {label!r} lies at bytes {offset} to {offset + num_bytes} "
                f"of a file of {self._size}"
            )
        self.tensors[name] = TensorInfo(name, block, shape, offset, num_bytes)

    # --------------------------------------------------------------------------------------------------------- tensors

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """Raw bytes of a tensor, uint8 [*shape[:-1], blocks, bytes of a block], a view of the mapping."""
        info = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        return raw.reshape(*info.shape[:-1], info.shape[-1] // info.type.size, info.type.num_bytes)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as numbers: F32 and F16 as they are (views), everything else as float32."""
        info = self.tensors[name]
        return dequantize(self.blocks(name), info.type)


# -------------------------------------------------------------------------------------------------------- block formats


def _fp16(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Runs of `width` bytes: first the low nibbles of a run, then its high ones. [N, B] -> [N, 2 B / width, width]."""
    runs = packed.reshape(len(packed), -1, 1, width)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(len(packed), -1, width)


def _k_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight 6-bit scales and eight 6-bit minimums out of 12 bytes: the low 4 are whole, the last 4 in two pieces."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _q4_0(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (_nibbles(b[:, 2:], 16).reshape(len(b), 32).astype(np.float32) - np.float32(8)) * _fp16(b, 0)


def _q4_1(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _nibbles(b[:, 4:], 16).reshape(len(b), 32).astype(np.float32) * _fp16(b, 0) + _fp16(b, 2)


def _q8_0(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32) * _fp16(b, 0)


def _q45_k(b: NDArray[np.uint8], quants: NDArray[np.uint8]) -> NDArray[np.float32]:
    """quants [N, 8, 32]; the two fp16 in front scale the 6-bit scales and minimums."""
    scale, minimum = _k_scales(b[:, 4:16])
    return (_fp16(b, 0) * scale)[..., None] * quants.astype(np.float32) - (_fp16(b, 2) * minimum)[..., None]


def _q4_k(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _q45_k(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    bit = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (b[:, None, 16:48] >> bit) & 1
    return _q45_k(b, (_nibbles(b[:, 48:], 32) | (fifth << 4)).astype(np.uint8))


def _q6_k(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    low = _nibbles(b[:, :128], 64).reshape(len(b), 8, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = ((b[:, 128:192].reshape(len(b), 2, 1, 32) >> shift) & 3).reshape(len(b), 8, 32)
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32) * _fp16(b, 208)
    return scale[..., None] * quants.reshape(len(b), 16, 16)


def _bf16(b: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


_DEQUANTIZE: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "BF16": _bf16,
}
_CHUNK_BLOCKS = 1 << 15  # bounds the temporaries of one piece to some 30 MB


def dequantize(blocks: NDArray[np.uint8], kind: BlockType) -> NDArray[Any]:
    """Blocks uint8 [..., n, bytes] of one type -> numbers [..., n * size]: float32, but F16 and F32 stay views."""
    shape = (*blocks.shape[:-2], blocks.shape[-2] * kind.size)
    if kind.name in ("F32", "F16"):
        dtype = np.float32 if kind.name == "F32" else np.float16
        return np.ascontiguousarray(blocks).view(dtype).reshape(shape)
    flat = blocks.reshape(-1, kind.num_bytes)
    out = np.empty((len(flat), kind.size), np.float32)
    undo = _DEQUANTIZE[kind.name]
    for start in range(0, len(flat), _CHUNK_BLOCKS):
        piece = flat[start : start + _CHUNK_BLOCKS]
        out[start : start + len(piece)] = undo(piece).reshape(len(piece), kind.size)
    return out.reshape(shape)

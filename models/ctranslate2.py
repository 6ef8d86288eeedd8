"""CTranslate2 model directories: the binary format of `model.bin`, and Whisper weights out of it under HF names.

    u32 version of the format (6), string name of the spec, u32 its revision, u32 number of variables, then each:
        string name, u8 rank, u32 dims[rank], u8 type, u32 bytes, the data
    u32 number of aliases, then each: string name, string target
    (a string is u16 length, then as many bytes, the last one zero; numbers are little endian)

Types: 0 float32, 1 int8, 2 int16, 3 int32, 4 float16, 5 bfloat16. An int8 or int16 matrix has a float32 variable
`..._scale` ([out] or one number) beside it; its values are q / scale. The file is mapped, nothing is read before it is
asked for, and every number is checked against the file's size. Unusable files are `ModelLoadError`s that name them by base name.
"""

from __future__ import annotations

import mmap
import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..engine.errors import ModelLoadError
from ..kernels.linear import LinearWeight, dequantize, slice_cols, slice_rows

FILE = "model.bin"
_VERSIONS = range(4, 7)  # of the binary format; 4 brought the type byte
_MAX_VARIABLES = 1 << 16
_MAX_NAME = 1 << 10
_MAX_RANK = 8
_TYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Variable:
    """Where a variable lies in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


class CTranslate2File:
    """The variables of a `model.bin`, aliases resolved. `get` gives views of the map: copy before writing."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path.name}: cannot be mapped ({error.__class__.__name__})") from None
        self.variables: dict[str, Variable] = {}
        self._at = 0
        try:
            self._read()
        except struct.error:
            raise self._bad("it ends within its header") from None

    def _bad(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.name}: not a usable CTranslate2 file: {what}")

    def _number(self, kind: str) -> int:
        value: int = struct.unpack_from("<" + kind, self._map, self._at)[0]
        self._at += struct.calcsize(kind)
        return value

    def _string(self) -> str:
        length = self._number("H")
        raw = self._map[self._at : self._at + length]
        self._at += length
        if len(raw) != length or not 0 < length <= _MAX_NAME or raw[-1]:
            raise self._bad(f"no string of {length} bytes at {self._at - length}")
        try:
            return raw[:-1].decode("ascii")
        except UnicodeDecodeError:
            raise self._bad("a name is not ASCII") from None

    def _read(self) -> None:
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._bad(f"expected a format version {_VERSIONS.start} to {_VERSIONS.stop - 1}, got {version}")
        self.spec = self._string()
        self.revision = self._number("I")
        count = self._number("I")
        if count > _MAX_VARIABLES:
            raise self._bad(f"it claims {count} variables")
        for _ in range(count):
            name = self._string()
            if name in self.variables:
                raise self._bad(f"{name[:80]!r} is there twice")
            self.variables[name] = self._variable(name)
        num_aliases = self._number("I")
        if num_aliases > _MAX_VARIABLES:
            raise self._bad(f"it claims {num_aliases} aliases")
        for _ in range(num_aliases):
            name, target = self._string(), self._string()
            if target not in self.variables or name in self.variables:
                raise self._bad(f"the alias {name[:80]!r} of {target[:80]!r} leads nowhere")
            self.variables[name] = self.variables[target]

    def _variable(self, name: str) -> Variable:
        rank = self._number("B")
        if rank > _MAX_RANK:
            raise self._bad(f"{name[:80]!r} has {rank} dimensions")
        shape = tuple(self._number("I") for _ in range(rank))
        type_id, num_bytes = self._number("B"), self._number("I")
        if type_id not in _TYPES:
            raise self._bad(f"{name[:80]!r} is of unknown type {type_id}")
        dtype, offset = _TYPES[type_id], self._at
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        if size != num_bytes or size > len(self._map) - offset:
            raise self._bad(f"{name[:80]!r} of shape {list(shape)} takes {size} bytes, the file says {num_bytes}")
        self._at += num_bytes
        return Variable(shape, dtype, offset, num_bytes)

    def get(self, name: str) -> Tensor:
        """The variable as stored, a read-only view where its place is aligned."""
        variable = self.variables.get(name)
        if variable is None:
            raise self._bad(f"there is no {name[:80]!r}")
        if not variable.num_bytes:
            return torch.empty(variable.shape, dtype=variable.dtype)
        raw = memoryview(self._map)[variable.offset : variable.offset + variable.num_bytes]
        with warnings.catch_warnings():  # torch has no read-only tensors and says so
            warnings.simplefilter("ignore", UserWarning)
            data = torch.frombuffer(raw, dtype=torch.uint8)
        if variable.offset % variable.dtype.itemsize:  # the format does not align its variables
            data = data.clone()
        return data.view(variable.dtype).view(variable.shape)

    def scalar(self, name: str, default: int) -> int:
        """A whole number stored as a variable without dimensions."""
        if name not in self.variables:
            return default
        value = self.get(name)
        if value.numel() != 1 or value.is_floating_point():
            raise self._bad(f"expected one whole number in {name[:80]!r}")
        return int(value)


# ------------------------------------------------------------------------------------------------------- Whisper names

_PARTS = {"weight": "weight", "bias": "bias"}
_NORM = {"weight": "gamma", "bias": "beta"}
# HF module within a layer -> (variable group, which third or half of its rows, of how many)
_ENCODER_LINEAR = {
    "self_attn.q_proj": ("self_attention/linear_0", 0, 3),
    "self_attn.k_proj": ("self_attention/linear_0", 1, 3),
    "self_attn.v_proj": ("self_attention/linear_0", 2, 3),
    "self_attn.out_proj": ("self_attention/linear_1", 0, 1),
    "fc1": ("ffn/linear_0", 0, 1),
    "fc2": ("ffn/linear_1", 0, 1),
}
_CROSS_LINEAR = {
    "encoder_attn.q_proj": ("attention/linear_0", 0, 1),
    "encoder_attn.k_proj": ("attention/linear_1", 0, 2),
    "encoder_attn.v_proj": ("attention/linear_1", 1, 2),
    "encoder_attn.out_proj": ("attention/linear_2", 0, 1),
}
_LAYER_NORMS = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "final_layer_norm": "ffn/layer_norm",
}
_TOP = {
    "model.encoder.conv1.weight": "encoder/conv1/weight",
    "model.encoder.conv1.bias": "encoder/conv1/bias",
    "model.encoder.conv2.weight": "encoder/conv2/weight",
    "model.encoder.conv2.bias": "encoder/conv2/bias",
    "model.encoder.embed_positions.weight": "encoder/position_encodings/encodings",
    "model.encoder.layer_norm.weight": "encoder/layer_norm/gamma",
    "model.encoder.layer_norm.bias": "encoder/layer_norm/beta",
    "model.decoder.embed_tokens.weight": "decoder/embeddings/weight",
    "model.decoder.embed_positions.weight": "decoder/position_encodings/encodings",
    "model.decoder.layer_norm.weight": "decoder/layer_norm/gamma",
    "model.decoder.layer_norm.bias": "decoder/layer_norm/beta",
    "proj_out.weight": "decoder/projection/weight",
}
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d{1,4})/")


@dataclass(frozen=True)
class _Place:
    variable: str
    part: int = 0
    num_parts: int = 1


class CTranslate2WhisperSource:
    """A `WeightSource` (models/loader.py) over a directory with a Whisper `model.bin`: transformers' parameter names.

    int8 matrices come as `LinearWeight`, convolutions and everything else as Tensor.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the directory or the file."""
        self.file = CTranslate2File(path / FILE if path.is_dir() else path)
        if self.file.spec != "WhisperSpec":
            raise ModelLoadError(
                f"{self.file.name}: expected a Whisper model in CTranslate2 format, got {self.file.spec[:40]!r}"
            )
        layers = {"encoder": -1, "decoder": -1}
        for name in self.file.variables:
            if found := _LAYER.match(name):
                layers[found[1]] = max(layers[found[1]], int(found[2]))
        self.num_layers = {side: last + 1 for side, last in layers.items()}
        self._places = {hf: _Place(name) for hf, name in _TOP.items() if name in self.file.variables}
        for side, count in self.num_layers.items():
            for layer in range(count):
                self._add_layer(side, layer)

    def _add_layer(self, side: str, layer: int) -> None:
        linears = _ENCODER_LINEAR if side == "encoder" else _ENCODER_LINEAR | _CROSS_LINEAR
        here, there = f"{side}/layer_{layer}/", f"model.{side}.layers.{layer}."
        for module, (group, part, num_parts) in linears.items():
            for field in _PARTS:
                if f"{here}{group}/{field}" in self.file.variables:
                    self._places[f"{there}{module}.{field}"] = _Place(f"{here}{group}/{field}", part, num_parts)
        for module, group in _LAYER_NORMS.items():
            for field, stored in _NORM.items():
                if f"{here}{group}/{stored}" in self.file.variables:
                    self._places[f"{there}{module}.{field}"] = _Place(f"{here}{group}/{stored}")

    def names(self) -> set[str]:
        return set(self._places)

    def _place(self, name: str) -> tuple[_Place, int, int]:
        """Where a parameter lies and which rows of the variable are its own."""
        place = self._places.get(name)
        if place is None:
            raise ModelLoadError(f"the weights hold no tensor named {name[:120]!r}")
        shape = self.file.variables[place.variable].shape
        rows = shape[0] if shape else 0
        if rows % place.num_parts:
            raise ModelLoadError(f"{self.file.name}: {place.variable!r} has {rows} rows for {place.num_parts} parts")
        size = rows // place.num_parts
        return place, place.part * size, (place.part + 1) * size

    def shape(self, name: str) -> tuple[int, ...]:
        place, lo, hi = self._place(name)
        return (hi - lo, *self.file.variables[place.variable].shape[1:])

    def get(self, name: str) -> Tensor | LinearWeight:
        place, lo, hi = self._place(name)
        stored = self.file.get(place.variable)
        if stored.dtype in _FLOATS:
            return stored[lo:hi]
        if stored.dtype == torch.int16:
            scale = self._scale(place.variable, stored.shape[0])[lo:hi]
            return stored[lo:hi].float() * scale.view(-1, *[1] * (stored.dim() - 1))
        if stored.dtype != torch.int8 or stored.dim() < 2:
            raise ModelLoadError(
                f"{self.file.name}: {place.variable!r} is {stored.dtype}; expected float, int8 or int16 weights"
            )
        weight = LinearWeight(
            format="int8",
            tensors={"weight": stored.flatten(1)[lo:hi], "scale": self._scale(place.variable, stored.shape[0])[lo:hi]},
            out_features=hi - lo,
            in_features=stored[0].numel(),
        )
        return dequantize(weight, torch.float32).view(hi - lo, *stored.shape[1:]) if stored.dim() > 2 else weight

    def _scale(self, variable: str, num_rows: int) -> Tensor:
        """Our scale (value = scale * q) of every row."""
        scale = self.file.get(variable + "_scale")
        if scale.dtype != torch.float32 or scale.numel() not in (1, num_rows) or not bool((scale > 0).all()):
            raise ModelLoadError(f"{self.file.name}: {variable + '_scale'!r} does not fit its weight")
        return scale.reshape(-1).reciprocal().expand(num_rows)

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> Tensor | LinearWeight:
        whole = self.get(name)
        shape = self.shape(name)
        if not 0 <= dim < min(len(shape), 3) or not 0 <= lo <= hi <= shape[dim]:
            raise ModelLoadError(f"tensor {name[:80]!r} of shape {list(shape)} has no slice {lo}:{hi} in {dim}")
        if isinstance(whole, Tensor):
            return whole[(slice(None),) * dim + (slice(lo, hi),)]
        return slice_rows(whole, lo, hi) if dim == 0 else slice_cols(whole, lo, hi)

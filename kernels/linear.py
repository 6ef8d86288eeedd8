"""Linear layers over weights in many formats: the weight (`LinearWeight`) is apart from the layer that uses it.

A weight lives in one of two states. *Storage* (layout "plain") is what a file holds and what can be sliced for a
`Shard` and concatenated for fused projections. `prepare` turns it, once, into what the compute dtype and the device run
best; a prepared weight can only be used (`linear`, `embedding`, `dequantize`).

    format        storage tensors                                                        value of weight [o, i]
    fp32 bf16 fp16  weight [out, in]                                                     weight[o, i]
    q4_0          blocks u8 [out, in/32, 18]: fp16 d, 16 bytes of nibbles                d * (q - 8)
    q4_1          blocks u8 [out, in/32, 20]: fp16 d, fp16 m, 16 bytes of nibbles        d * q + m
    q8_0          blocks u8 [out, in/32, 34]: fp16 d, 32 int8                            d * q
    int8          weight i8 [out, in], scale fp32 [out]                                  scale * q
    fp8           weight e4m3 [out, in], scale fp32 [out]                                scale * q
    int4          weight u8 [out, in/2] (low nibble = even i), scale, minimum            scale * q + minimum
                  fp16 or fp32 [out, in/group]
    (in a block of q4_x, byte j holds element j in its low and element j + 16 in its high nibble)

What it does not know: names, files, models. Errors are `ValueError` that say what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from . import dispatch

Format = Literal["fp32", "bf16", "fp16", "q4_0", "q4_1", "q8_0", "int8", "int4", "fp8"]
Layout = Literal["plain", "rows16", "int4pack", "int8pack", "tiles", "gpu4", "gpu8", "fp8"]

FLOAT_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOAT_FORMATS: dict[torch.dtype, Format] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BLOCK = 32  # weights in a block of q4_0, q4_1, q8_0
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearWeight:
    """The weight [out_features, in_features] of a linear layer or an embedding; see the table above for `tensors`.

    `group` = how many weights along `in` share a scale (0: the format has none, or one for the whole row).
    """

    format: Format
    tensors: dict[str, Tensor]
    out_features: int
    in_features: int
    group: int = 0
    layout: Layout = "plain"

    @property
    def is_quantized(self) -> bool:
        return self.format not in FLOAT_DTYPES

    @property
    def num_bytes(self) -> int:
        """Bytes the tensors take, for memory budgets."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


# ------------------------------------------------------------------------------------------------------ construction


def from_tensor(weight: Tensor) -> LinearWeight:
    """Wrap a float matrix [out, in]; shares memory."""
    if weight.dim() != 2 or weight.dtype not in FLOAT_FORMATS:
        raise ValueError(f"expected a 2-D fp32, bf16 or fp16 weight, got {weight.dim()}-D {weight.dtype}")
    return LinearWeight(
        format=FLOAT_FORMATS[weight.dtype],
        tensors={"weight": weight},
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )


def as_weight(weight: Tensor | LinearWeight) -> LinearWeight:
    """A `LinearWeight` from either kind that a weight source gives."""
    return weight if isinstance(weight, LinearWeight) else from_tensor(weight)


def from_blocks(format: Format, blocks: Tensor) -> LinearWeight:
    """Wrap GGUF blocks, uint8 [out, in/32, block bytes]; shares memory."""
    expected = BLOCK_BYTES.get(format)
    if expected is None or blocks.dim() != 3 or blocks.dtype != torch.uint8 or blocks.shape[2] != expected:
        raise ValueError(
            f"expected uint8 [out, in/32, {expected}] for {format}, got {blocks.dtype} {list(blocks.shape)}"
        )
    return LinearWeight(
        format=format,
        tensors={"blocks": blocks},
        out_features=blocks.shape[0],
        in_features=blocks.shape[1] * BLOCK,
        group=BLOCK,
    )


def quantize_int8(weight: Tensor) -> LinearWeight:
    """Weight-only int8, one scale a row: the nearest of 255 levels, symmetric. `weight` is a float [out, in]."""
    w = weight.float()
    scale = (w.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    q = (w / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return LinearWeight(
        format="int8", tensors={"weight": q, "scale": scale}, out_features=w.shape[0], in_features=w.shape[1]
    )


def quantize_fp8(weight: Tensor) -> LinearWeight:
    """FP8 (e4m3), one scale a row: a row's largest magnitude becomes 448. `weight` is a float [out, in]."""
    w = weight.float()
    scale = (w.abs().amax(dim=1) / 448).clamp_min(torch.finfo(torch.float32).tiny)
    q = (w / scale[:, None]).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return LinearWeight(
        format="fp8", tensors={"weight": q, "scale": scale}, out_features=w.shape[0], in_features=w.shape[1]
    )


def quantize_int4(weight: Tensor, group: int = 32) -> LinearWeight:
    """Weight-only int4 with a scale and a minimum for each `group` (32, 64 or 128) weights of a row; [out, in] in."""
    out_features, in_features = weight.shape
    if group not in (32, 64, 128) or in_features % group:
        raise ValueError(f"int4 group must be 32, 64 or 128 and divide in_features={in_features}, got {group}")
    w = weight.float().view(out_features, in_features // group, group)
    low, high = w.aminmax(dim=2)
    scale = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    halves = torch.stack([scale, low]).half()
    if bool(halves.isfinite().all()) and float(halves[0].min()) >= 2.0**-14:  # fp16 holds them without losing digits
        scale, low = halves[0], halves[1]
    steps = (w - low[..., None].float()) / scale[..., None].float()
    q = steps.round_().clamp_(0, 15).to(torch.uint8).view(out_features, -1)
    packed = q[:, 0::2] | (q[:, 1::2] << 4)
    return LinearWeight(
        format="int4",
        tensors={"weight": packed, "scale": scale, "minimum": low.contiguous()},
        out_features=out_features,
        in_features=in_features,
        group=group,
    )


# ----------------------------------------------------------------------------------------- slicing and concatenation


def _need_plain(w: LinearWeight) -> None:
    assert w.layout == "plain", f"a prepared weight ({w.layout}) cannot be sliced or concatenated"


def slice_rows(w: LinearWeight, lo: int, hi: int) -> LinearWeight:
    """Output features lo..hi (column parallel). A view."""
    _need_plain(w)
    if not 0 <= lo <= hi <= w.out_features:
        raise ValueError(f"rows {lo}:{hi} lie outside a weight of {w.out_features} rows")
    return LinearWeight(
        format=w.format,
        tensors={k: t[lo:hi] for k, t in w.tensors.items()},
        out_features=hi - lo,
        in_features=w.in_features,
        group=w.group,
    )


def slice_cols(w: LinearWeight, lo: int, hi: int) -> LinearWeight:
    """Input features lo..hi (row parallel), aligned to the group. A view."""
    _need_plain(w)
    step = w.group or 1
    if not 0 <= lo <= hi <= w.in_features or lo % step or hi % step:
        raise ValueError(f"columns {lo}:{hi} must lie inside {w.in_features} and be multiples of the group {step}")
    tensors = {}
    for name, t in w.tensors.items():
        if t.dim() == 1:  # one scale a row serves every column
            tensors[name] = t
        else:
            per = w.in_features // t.shape[1]  # columns behind one entry of dim 1: 1, 2 (nibbles) or the group
            tensors[name] = t[:, lo // per : hi // per]
    return LinearWeight(
        format=w.format, tensors=tensors, out_features=w.out_features, in_features=hi - lo, group=w.group
    )


def take_rows(w: LinearWeight, order: Tensor) -> LinearWeight:
    """Rows in another order (or some of them); `order` is int64. A copy."""
    _need_plain(w)
    return LinearWeight(
        format=w.format,
        tensors={k: t.index_select(0, order) for k, t in w.tensors.items()},
        out_features=order.numel(),
        in_features=w.in_features,
        group=w.group,
    )


def concat_rows(parts: Sequence[LinearWeight]) -> LinearWeight:
    """One weight from several that read the same input (fused QKV, gate-up). Formats that differ become fp32."""
    for w in parts:
        _need_plain(w)
    first = parts[0]
    if any(w.in_features != first.in_features for w in parts):
        raise ValueError(f"in_features differ: {[w.in_features for w in parts]}")
    out_features = sum(w.out_features for w in parts)
    if any((w.format, w.group) != (first.format, first.group) for w in parts):
        return from_tensor(torch.cat([dequantize(w, torch.float32) for w in parts]))
    tensors = {k: torch.cat([w.tensors[k] for w in parts]) for k in first.tensors}
    return LinearWeight(
        format=first.format,
        tensors=tensors,
        out_features=out_features,
        in_features=first.in_features,
        group=first.group,
    )


# ------------------------------------------------------------------------------------------------------ dequantization


def _fp16_field(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at byte `at` of every block, as fp32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """The 32 four-bit values of every block, as fp32 [..., 32]."""
    packed = blocks[..., at : at + 16]
    return torch.cat([packed & 0xF, packed >> 4], dim=-1).float()


def _dequantize_plain(w: LinearWeight) -> Tensor:
    """fp32 [out, in] of a weight in storage layout."""
    t = w.tensors
    if w.format == "q4_0":
        value = (_nibbles(t["blocks"], 2) - 8) * _fp16_field(t["blocks"], 0)
    elif w.format == "q4_1":
        value = _nibbles(t["blocks"], 4) * _fp16_field(t["blocks"], 0) + _fp16_field(t["blocks"], 2)
    elif w.format == "q8_0":
        value = t["blocks"][..., 2:].contiguous().view(torch.int8).float() * _fp16_field(t["blocks"], 0)
    elif w.format in ("int8", "fp8"):
        value = t["weight"].float() * t["scale"][:, None]
    elif w.format == "int4":
        q = torch.stack([t["weight"] & 0xF, t["weight"] >> 4], dim=-1)
        q = q.view(w.out_features, w.in_features // w.group, w.group).float()
        value = q * t["scale"][..., None].float() + t["minimum"][..., None].float()
    else:
        value = t["weight"].float()
    return value.reshape(w.out_features, w.in_features)


def dequantize(w: LinearWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, whatever the format and layout. A view where a float weight already has the dtype."""
    if w.layout == "rows16":
        return _take_rows16(w, None, dtype)
    if w.layout in _GPU_LAYOUTS:
        return _gpu().take_rows(w, None, dtype)  # type: ignore[no-any-return]
    if not w.is_quantized:
        return w.tensors["weight"].to(dtype)
    return _dequantize_plain(w).to(dtype)


# ----------------------------------------------------------------------------------------------------------- the door


def prepare(
    w: LinearWeight, dtype: torch.dtype, device: torch.device | str = "cpu", *, invariant: bool = False
) -> LinearWeight:
    """The weight as `linear` runs it best for activations of `dtype` on `device`. Once, at load.

    bf16 keeps quantized weights quantized, on CUDA (gpu/linear.py) fp16 does too; every other case dequantizes to
    `dtype` (fp32 then computes with the exact values of the file). `invariant` (fp32 on a CPU only, slower): a row's
    result never depends on R.
    """
    _need_plain(w)
    if invariant:
        if dtype != torch.float32 or torch.device(device).type != "cpu":
            raise ValueError(f"invariant: expected float32 on a CPU, got {dtype} on {device}")
        return replace(from_tensor(dequantize(w, dtype).contiguous()), layout="tiles")
    if w.is_quantized and dispatch.gpu_ops(torch.device(device).type) is not None:
        on_gpu: LinearWeight | None = _gpu().prepare(w, dtype, torch.device(device))
        if on_gpu is not None:
            return on_gpu
    if dtype == torch.bfloat16 and torch.device(device).type == "cpu" and w.format != "fp8":
        if _ops() is not None and w.in_features % BLOCK == 0 and (w.is_quantized or has_bf16_products()):
            return _to_rows16(w)
        if w.is_quantized:
            return _to_torch_packed(w)
    return from_tensor(dequantize(w, dtype).to(device).contiguous())


_GPU_LAYOUTS = frozenset(("gpu4", "gpu8", "fp8"))


@cache
def _gpu() -> ModuleType:
    """The CUDA side, kernels/gpu/linear.py: imports Triton."""
    from .gpu import linear as gpu_linear

    return gpu_linear


def linear(x: Tensor, w: LinearWeight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [R, in] times weight^T (+ bias [out]) -> [R, out] in x's dtype, or in `out_dtype` (fp32: for logits).

    `w` is prepared for x's dtype, or in storage. Quantized weights in layout rows16 meet activations that are rounded to
    8 bits, each 32 inputs of a row with a scale of their own (as llama.cpp does it); bf16 weights meet them as they are.
    In layout rows16 and below `many_rows`, which quantized weights reach only with AMX or without AVX2, a row's result
    depends on nothing but the row: not on R, not on threads.
    """
    if out_dtype is not None and out_dtype != x.dtype and not (w.layout == "rows16" and out_dtype is torch.float32):
        return linear(x, w, bias).to(out_dtype)
    layout = w.layout
    if layout != "plain" and x.dim() != 2:
        flat = linear(x.reshape(-1, x.shape[-1]), w, bias, out_dtype=out_dtype)
        return flat.view(*x.shape[:-1], w.out_features)
    if layout == "rows16" and x.dtype is torch.bfloat16:
        if x.shape[0] < many_rows(w.format):
            t, bits, zero = w.tensors, *BITS_ZERO[w.format]
            multiply = torch.ops.motet_cpu.rows16_linear.default
            fp32 = out_dtype is torch.float32
            y: Tensor = multiply(
                x, t["quants"], t.get("scale"), t.get("minimum"), bias, bits, zero, w.out_features, fp32
            )
            return y
    elif layout in _GPU_LAYOUTS:
        return _gpu().linear(x, w, bias)  # type: ignore[no-any-return]
    elif layout == "tiles":
        return _tiled_linear(x, w.tensors["weight"], bias)
    elif layout in ("int4pack", "int8pack") and x.shape[0] <= _TORCH_PACKED_ROWS:
        return _torch_packed_linear(x, w, bias)
    # Torch's bf16 matmul may be scalar code: fp32 then.
    scalar = x.dtype is torch.bfloat16 and x.is_cpu and not torch_multiplies_bf16()
    dtype = torch.float32 if scalar else x.dtype
    y = F.linear(x.to(dtype), dequantize(w, dtype), None if bias is None else bias.to(dtype))
    return y.to(out_dtype or x.dtype)


def has_byte_products() -> bool:
    """Whether 8-bit weights are faster than bf16 ones on this CPU however many rows there are."""
    return _ops() is not None and many_rows("int8") == _NEVER


def multiplies_bytes(w: LinearWeight) -> bool:
    """Whether `linear` runs any number of rows of this prepared weight in 8 bits, which is faster than bf16 then."""
    return w.layout == "rows16" and w.is_quantized and has_byte_products()


_TILE = 16


def _tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in] in tiles of 16 rows, the last one padded: the BLAS then takes one path whatever R is."""
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % _TILE))
    return torch.cat([F.linear(tile, weight, bias) for tile in padded.split(_TILE)])[:num_rows]


def linear_reference(x: Tensor, w: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """The same in plain fp32: what `linear` is tested against."""
    out = x.float() @ dequantize(w, torch.float32).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def embedding(ids: Tensor, w: LinearWeight, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [N] of the weight -> [N, in] in `dtype`, dequantizing only those. Ids out of range are an error."""
    if w.layout == "rows16":
        return _take_rows16(w, ids, dtype)
    if w.layout in _GPU_LAYOUTS:
        return _gpu().take_rows(w, ids, dtype)  # type: ignore[no-any-return]
    if not w.is_quantized:
        return F.embedding(ids, w.tensors["weight"]).to(dtype)
    plain = LinearWeight(
        format=w.format,
        tensors={k: v for k, v in w.tensors.items() if k not in _PACKED_EXTRAS},
        out_features=w.out_features,
        in_features=w.in_features,
        group=w.group,
    )
    return dequantize(take_rows(plain, ids), dtype)


# ------------------------------------------------------------------------------- layout rows16 (kernels/cpu/linear.cpp)

# Per format, bits of a stored number and the number that means 0; float weights are stored as bf16.
BITS_ZERO: dict[str, tuple[int, int]] = {
    "q4_0": (4, 8),
    "q4_1": (4, 0),
    "int4": (4, 0),
    "q8_0": (8, 0),
    "int8": (8, 0),
    "bf16": (16, 0),
    "fp32": (16, 0),
    "fp16": (16, 0),
}
# From so many rows on, torch's matmul over bf16 weights (unpacked on the way where they are quantized) is faster.
# Measured on an EPYC 9005 (AVX-512 BF16 and VNNI, no AMX): torch attains 0.86 TFLOP/s on two cores, the bytes of
# int8.cpp 1.4, so that quantized weights never go there. AMX is several times faster than either, and the limit
# accordingly lower (estimated, not measured: no such machine was at hand).
_NEVER = 1 << 62
_MANY_ROWS = {4: _NEVER, 8: _NEVER, 16: 192}
_MANY_ROWS_AMX = {4: 24, 8: 24, 16: 24}
_MANY_ROWS_PLAIN = {4: 64, 8: 64, 16: 192}  # any other processor; torch has the better instructions: estimated too


@cache
def _ops() -> object | None:
    """The C++ linear ops, or None where they are not built or not wanted."""
    if dispatch.cpu_ops() is None or not hasattr(torch.ops.motet_cpu, "rows16_linear"):
        return None
    return torch.ops.motet_cpu


@cache
def has_bf16_products() -> bool:
    """Whether the C++ kernel multiplies bf16 well here. If not, torch serves float weights better."""
    return _ops() is not None and bool(torch.ops.motet_cpu.bf16_instruction_set() != "plain")


@cache
def torch_multiplies_bf16() -> bool:
    """Whether torch's own bf16 matmul is worth using on this CPU: it needs AVX-512.

    On two cores of an EPYC Zen 3 (AVX2) it does 0.4 to 3 billion products a second, by shape; fp32 52 and bf16.cpp 70.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def many_rows(format: str) -> int:
    """From how many rows on `linear` multiplies a rows16 weight of this format by torch's matmul on this CPU."""
    bits = BITS_ZERO[format][0]
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return _MANY_ROWS_AMX[bits]
    if bits == 16 and not torch_multiplies_bf16():
        return _NEVER
    return (_MANY_ROWS_PLAIN if torch.ops.motet_cpu.int8_instruction_set() == "plain" else _MANY_ROWS)[bits]


def _to_tiles(table: Tensor) -> Tensor:
    """[out, groups] -> [tiles, groups, 16], padded with zeros."""
    padded = F.pad(table, (0, 0, 0, -table.shape[0] % 16))
    return padded.view(-1, 16, table.shape[1]).transpose(1, 2).contiguous()


def integers_of(w: LinearWeight) -> Tensor:
    """The whole numbers of a quantized weight in storage: u8 (four bits) or i8, [out, in]."""
    if w.format == "int8":
        return w.tensors["weight"]
    if w.format == "int4":
        return torch.stack([w.tensors["weight"] & 0xF, w.tensors["weight"] >> 4], dim=-1).view(w.out_features, -1)
    blocks = w.tensors["blocks"]
    if w.format == "q8_0":
        return blocks[..., 2:].contiguous().view(torch.int8).view(w.out_features, -1)
    packed = blocks[..., 2 if w.format == "q4_0" else 4 :]
    return torch.cat([packed & 0xF, packed >> 4], dim=-1).view(w.out_features, -1)


def scales_of(w: LinearWeight) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum [out, groups] of a quantized weight in storage, fp16 or fp32 as stored."""
    if w.format == "int8":
        return w.tensors["scale"][:, None], None
    if w.format == "int4":
        return w.tensors["scale"], w.tensors["minimum"]
    halves = w.tensors["blocks"][..., : 4 if w.format == "q4_1" else 2].contiguous().view(torch.float16)
    return halves[..., 0], halves[..., 1] if w.format == "q4_1" else None


def _to_rows16(w: LinearWeight) -> LinearWeight:
    if w.is_quantized:
        scale, minimum = scales_of(w)
        tensors = {
            "quants": torch.ops.motet_cpu.rows16_pack(integers_of(w), BITS_ZERO[w.format][0]),
            "scale": _to_tiles(scale),
        }
        if minimum is not None:
            tensors["minimum"] = _to_tiles(minimum)
        format = w.format
    else:
        tensors = {"quants": torch.ops.motet_cpu.rows16_pack(w.tensors["weight"].to(torch.bfloat16), 16)}
        format = "bf16"
    return LinearWeight(
        format=format,
        tensors=tensors,
        out_features=w.out_features,
        in_features=w.in_features,
        group=w.group,
        layout="rows16",
    )


def _take_rows16(w: LinearWeight, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows `ids` (None: all) of a weight in layout rows16, [n, in] in `dtype`."""
    t, bits, zero = w.tensors, *BITS_ZERO[w.format]
    made = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    rows: Tensor = torch.ops.motet_cpu.rows16_take(
        ids, t["quants"], t.get("scale"), t.get("minimum"), bits, zero, w.out_features, made
    )
    return rows.to(dtype)


# ---------------------------------------------------------------- layouts int4pack, int8pack (no compiler: torch's ops)

_TORCH_PACKED_ROWS = 8  # measured: beyond, these ops lose to a bf16 matmul even with the dequantization before it
_PACKED_EXTRAS = ("packed", "scale_zero", "scale_bf16")


def _to_torch_packed(w: LinearWeight) -> LinearWeight:
    """Torch's weight-only layouts beside the storage one, which serves many rows. q8_0 has none: it becomes bf16.

    Scales are rounded to bf16 here (relative error 2^-9), as those ops want it.
    """
    extras: dict[str, Tensor] = {}
    layout: Layout = "plain"
    if w.format == "int8":
        extras, layout = {"scale_bf16": w.tensors["scale"].bfloat16()}, "int8pack"
    elif w.format in ("q4_0", "q4_1", "int4") and w.out_features % 64 == 0:
        scale, minimum = scales_of(w)
        zero = torch.zeros_like(scale, dtype=torch.float32) if minimum is None else minimum.float() + 8 * scale.float()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers_of(w).to(torch.int32), 1)
        pairs = torch.stack([scale.float().T, zero.T], dim=-1).bfloat16().contiguous()
        extras, layout = {"packed": packed, "scale_zero": pairs}, "int4pack"
    if layout == "plain":
        return from_tensor(dequantize(w, torch.bfloat16))
    return LinearWeight(
        format=w.format,
        tensors={k: v.contiguous() for k, v in w.tensors.items()} | extras,
        out_features=w.out_features,
        in_features=w.in_features,
        group=w.group,
        layout=layout,
    )


def _torch_packed_linear(x: Tensor, w: LinearWeight, bias: Tensor | None) -> Tensor:
    t = w.tensors
    xb = x.bfloat16().contiguous()
    if w.layout == "int4pack":
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(xb, t["packed"], w.group, t["scale_zero"])
    else:
        y = torch.ops.aten._weight_int8pack_mm(xb, t["weight"], t["scale_bf16"])
    out: Tensor = (y if bias is None else y + bias).to(x.dtype)
    return out

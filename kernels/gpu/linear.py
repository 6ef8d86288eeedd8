"""Linear layers on CUDA: layouts of quantized weights made once by `prepare`, and which kernel multiplies how many rows.

    layout  formats                     tensors
    gpu4    q4_0 q4_1 int4 (bf16, fp16) quants u8 [tiles, out, group], scale and minimum [groups, out] as stored
    gpu8    q8_0 int8      (bf16, fp16) quants i8 [tiles, out, group], scale [groups, out], or [1, out] for int8
    fp8     fp8            (bf16)       weight e4m3 [out, in], scale fp32 [1, out]

A tile holds one group of 8-bit or two groups of 4-bit weights for every output, so that a program reads one piece of
memory. gpu4 and gpu8 multiply 16-bit activations (W4A16, W8A16) in the Triton kernel of quantized_matmul.py, and for many
rows unpack the weight for cuBLAS. INT8 activations (torch._int_mm) are not used: they would cost quality that nobody
asked for. fp8 is W8A8: activations are quantized row by row, torch._scaled_mm multiplies.

Not run on a GPU yet: row limits and tile sizes are estimates from bytes and operations, the numbers are checked under
Triton's interpreter and by compiling for sm_90.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..linear import LinearWeight, integers_of, scales_of
from .quantized_matmul import dequantize_kernel, quantize_rows_kernel, quantized_matmul_kernel
from .rounding import INTERPRETED, dot_dtype

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
INT8_TILE = 64  # columns in a tile of a weight with one scale a row
# Up to so many rows the weight's bytes bound the time (4 bits: 2 * rows FLOP per half byte meet 990 TFLOP/s over
# 4.8 TB/s at 51 rows).
FEW_ROWS = 64
# From so many rows on, unpacking to 16 bits for cuBLAS (4.5 bytes of traffic a weight) costs less than the Triton kernel
# loses to cuBLAS. Estimated.
MANY_ROWS = 512
_ZERO = {"q4_0": 8, "q4_1": 0, "int4": 0, "q8_0": 0, "int8": 0}


def has_fp8(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs there: CUDA from compute capability 8.9 on (on a CPU it is for tests)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


# ------------------------------------------------------------------------------------------------------------ layouts


def prepare(w: LinearWeight, dtype: torch.dtype, device: torch.device) -> LinearWeight | None:
    """A quantized weight in storage as `linear` wants it on `device`; None where dequantizing to `dtype` is the way."""
    if w.format == "fp8":
        if dtype != torch.bfloat16 or w.in_features % 16 or w.out_features % 16 or not has_fp8(device):
            return None
        tensors = {
            "weight": w.tensors["weight"].to(device).contiguous(),
            "scale": w.tensors["scale"].to(device, torch.float32).reshape(1, -1).contiguous(),
        }
        return _like(w, tensors, "fp8")
    if dtype not in (torch.bfloat16, torch.float16) or w.format not in _ZERO:
        return None
    four_bits = w.format in ("q4_0", "q4_1", "int4")
    width = w.group or INT8_TILE
    integers = integers_of(w).to(device)
    num_groups = -(-w.in_features // width)
    num_groups += num_groups % 2 if four_bits else 0
    integers = F.pad(integers, (0, num_groups * width - w.in_features)).view(w.out_features, num_groups, width)
    if four_bits:
        integers = integers[:, 0::2] | (integers[:, 1::2] << 4)
    tensors = {"quants": integers.transpose(0, 1).contiguous()}
    scale, minimum = scales_of(w)
    for name, table in (("scale", scale), ("minimum", minimum)):
        if table is not None:
            table = table.to(device).T
            missing = num_groups - table.shape[0] if w.group else 0
            tensors[name] = F.pad(table, (0, 0, 0, missing)).contiguous()
    return _like(w, tensors, "gpu4" if four_bits else "gpu8")


def _like(w: LinearWeight, tensors: dict[str, Tensor], layout: str) -> LinearWeight:
    return LinearWeight(
        format=w.format,
        tensors=tensors,
        out_features=w.out_features,
        in_features=w.in_features,
        group=w.group,
        layout=layout,  # type: ignore[arg-type]
    )


def take_rows(w: LinearWeight, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows `ids` [n] (None: all) of a prepared weight, dequantized: [n, in] in `dtype`."""
    t = w.tensors
    if w.layout == "fp8":
        weight, scale = (t["weight"], t["scale"][0]) if ids is None else (t["weight"][ids], t["scale"][0, ids])
        return (weight.float() * scale[:, None]).to(dtype)
    quants = t["quants"] if ids is None else t["quants"][:, ids]
    if w.layout == "gpu4":
        quants = torch.stack((quants & 0xF, quants >> 4), dim=1).flatten(0, 1)  # [groups, n, group]
    value = quants.float() - _ZERO[w.format]
    scale = t["scale"] if ids is None else t["scale"][:, ids]
    value *= scale.float()[..., None]
    if "minimum" in t:
        value += (t["minimum"] if ids is None else t["minimum"][:, ids]).float()[..., None]
    return value.transpose(0, 1).flatten(1)[:, : w.in_features].to(dtype)


# --------------------------------------------------------------------------------------------------------- the door


def linear(x: Tensor, w: LinearWeight, bias: Tensor | None) -> Tensor:
    """x [M, in] times weight^T (+ bias [out]) -> [M, out] in x's dtype, for a weight in one of the layouts above."""
    if not x.shape[0]:
        return x.new_zeros(0, w.out_features)
    if w.layout == "fp8":
        return _fp8_linear(x, w, bias)
    if not (x.is_cuda or INTERPRETED):
        return F.linear(x, take_rows(w, None, x.dtype), bias)
    if x.shape[0] >= MANY_ROWS:
        return F.linear(x, unpack(w, x.dtype), bias)
    return quantized_matmul(x, w, bias)


def quantized_matmul(x: Tensor, w: LinearWeight, bias: Tensor | None = None, *, splits: int = 0) -> Tensor:
    """The Triton kernel: x [M, in] bf16 or fp16, `w` in layout gpu4 or gpu8. `splits` of K: 0 = chosen."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, out_features = x.shape[0], w.out_features
    quants = w.tensors["quants"]
    num_tiles, width = quants.shape[0], quants.shape[2]
    few = num_rows <= FEW_ROWS
    block_m = max(16, triton.next_power_of_2(num_rows)) if few else 128
    block_n = 64 if few else 128
    grid_m, grid_n = -(-num_rows // block_m), -(-out_features // block_n)
    if not splits:
        splits = num_splits(grid_m * grid_n, num_tiles, _num_processors(x.device)) if few else 1
    tiles_each = -(-num_tiles // splits)
    splits = -(-num_tiles // tiles_each)  # none of them empty
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    parts, arrived = out, out
    if splits > 1:
        parts = torch.empty(splits, num_rows, out_features, dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device)
        assert grid_m * grid_n <= arrived.numel()
    scale = w.tensors["scale"]
    minimum = w.tensors.get("minimum")
    quantized_matmul_kernel[(grid_n, grid_m, splits)](
        x, quants, scale, scale if minimum is None else minimum, scale if bias is None else bias, out, parts, arrived,
        num_rows, out_features, w.in_features, x.stride(0), num_tiles, tiles_each,
        BITS=4 if w.layout == "gpu4" else 8, ZERO=_ZERO[w.format], GROUP=width, BY_GROUP=w.group > 0,
        HAS_MINIMUM=minimum is not None, HAS_BIAS=bias is not None, FOLD=not few, SPLIT=splits > 1, BM=block_m, BN=block_n,
        DOT=dot_dtype(x.dtype),
        num_warps=4 if few else 8, num_stages=5 if few else 3,
    )  # fmt: skip
    return out


def num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Parts of K: enough programs for four per multiprocessor, each with at least four tiles, 32 at most."""
    wanted = -(-4 * num_processors // num_programs)
    return max(1, min(wanted, num_tiles // 4, 32))


def unpack(w: LinearWeight, dtype: torch.dtype) -> Tensor:
    """The whole weight [out, in] in `dtype`, by one Triton kernel."""
    quants = w.tensors["quants"]
    out = torch.empty(w.out_features, w.in_features, dtype=dtype, device=quants.device)
    scale, minimum = w.tensors["scale"], w.tensors.get("minimum")
    block_n = 64
    dequantize_kernel[(-(-w.out_features // block_n), quants.shape[0])](
        quants, scale, scale if minimum is None else minimum, out, w.out_features, w.in_features,
        BITS=4 if w.layout == "gpu4" else 8, ZERO=_ZERO[w.format], GROUP=quants.shape[2], BY_GROUP=w.group > 0,
        HAS_MINIMUM=minimum is not None, BN=block_n,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------- fp8


def _fp8_linear(x: Tensor, w: LinearWeight, bias: Tensor | None) -> Tensor:
    quantized, scale = quantize_rows(x)
    weight, weight_scale = w.tensors["weight"], w.tensors["scale"]
    out: Tensor = torch._scaled_mm(
        quantized, weight.t(), scale_a=scale, scale_b=weight_scale, bias=bias, out_dtype=x.dtype
    )
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 [M, K] and fp32 scales [M, 1]: a row's largest magnitude becomes 448. A row of NaN stays NaN."""
    if not (x.is_cuda or INTERPRETED):
        wide = x.float()
        scale = (wide.abs().amax(dim=1, keepdim=True) / FP8_LARGEST).clamp_min(1e-12)
        return (wide / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8), scale
    return quantize_rows_on_gpu(x)


def quantize_rows_on_gpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` as one Triton kernel."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=FP8, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[(num_rows,)](
        x, out, scale, width, x.stride(0), LARGEST=FP8_LARGEST, BLOCK=block, num_warps=max(4, min(16, block // 1024))
    )
    return out, scale


# ------------------------------------------------------------------------------------------------------------ per device


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Zeros, int32, one for each tile of outputs; the kernel leaves them at zero. Made once: captured graphs hold its
    address. Only one stream of a device multiplies at a time.
    """
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)

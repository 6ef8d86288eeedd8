"""Which tensors the Triton kernels take, and the calls; the doors in kernels/ ask `can_*` and else run plain torch.

Every call has its door's name and signature. Imports Triton: come here through `dispatch.gpu_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention import SCALE_BYTES
from ..sage_attention import MAX_HEAD_DIM as MAX_DENSE_HEAD_DIM
from .activation import gelu_tanh_mul, silu_mul
from .attention import paged_attention
from .cache import QUANTIZED, copy_slots, store_kv
from .libraries import dense
from .linear import quantize_rows_on_gpu
from .norm import MAX_FEATURES, rms_norm, rms_norm_residual
from .rotary import apply_rotary, rotary_store_kv
from .rounding import INTERPRETED
from .sage_attention import sage_attention
from .sampling import sample

__all__ = [
    "apply_rotary",
    "copy_slots",
    "dense",
    "gelu_tanh_mul",
    "paged_attention",
    "quantize_rows_on_gpu",
    "rms_norm",
    "rms_norm_residual",
    "rotary_store_kv",
    "sage_attention",
    "sample",
    "silu_mul",
    "store_kv",
]

_TYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
MAX_HEAD_DIM = 256
MAX_HEADS_PER_KV = 64  # all of them share a tile


def _can_cache(kv: torch.Tensor, dim: int) -> bool:
    """Whether the kernels read and write this cache for heads of `dim`."""
    if kv.stride(-1) != 1 or dim > MAX_HEAD_DIM:
        return False
    if kv.dtype not in QUANTIZED:
        return kv.dtype in _TYPES
    aligned = all(stride % SCALE_BYTES == 0 for stride in kv.stride()[:4])
    return kv.shape[-1] >= dim + SCALE_BYTES and aligned and (kv.dtype is torch.int8 or _has_e4m3(kv.device))


def _has_e4m3(device: torch.device) -> bool:
    """Triton compiles e4m3 for compute capability 8.9 and above."""
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (8, 9)


def can_store(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor) -> bool:
    contiguous = k.stride(-1) == v.stride(-1) == 1
    return contiguous and k.dtype in _TYPES and v.dtype in _TYPES and _can_cache(kv, k.shape[-1])


def can_copy(kvs: Sequence[torch.Tensor]) -> bool:
    first = kvs[0]
    same = all(kv.dtype is first.dtype and kv.shape == first.shape and kv.is_contiguous() for kv in kvs)
    return same and first.numel() > 0


def can_attend(q: torch.Tensor, kv: torch.Tensor) -> bool:
    dim = q.shape[-1]
    return (
        q.dtype in _TYPES and q.stride(-1) == 1 and q.shape[1] <= MAX_HEADS_PER_KV * kv.shape[2] and _can_cache(kv, dim)
    )


def can_attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """For SageAttention, in fp16 products or FP8."""
    known = all(t.dtype in _TYPES and t.stride(-1) == 1 for t in (q, k, v))
    return known and q.shape[-1] <= MAX_DENSE_HEAD_DIM and _has_e4m3(q.device)


def can_quantize_rows(x: torch.Tensor) -> bool:
    return x.dtype in _TYPES and x.dim() == 2 and x.shape[0] > 0 and _has_e4m3(x.device)


def can_rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
    return q.dtype in _TYPES and k.dtype in _TYPES and q.stride(-1) == k.stride(-1) == 1 and cos.dtype is torch.float32


def can_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    known = x.dtype in _TYPES and weight.dtype in _TYPES and weight.is_contiguous()
    return known and 2 <= x.dim() <= 3 and x.stride(-1) == 1 and x.shape[-1] <= MAX_FEATURES


def can_norm_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    return can_norm(x, weight) and x.dim() == 2 and residual.dtype is torch.float32 and residual.stride(-1) == 1


def can_gate(gate_up: torch.Tensor) -> bool:
    return gate_up.dtype in _TYPES and gate_up.dim() == 2 and gate_up.stride(1) == 1


def can_sample(logits: torch.Tensor) -> bool:
    return logits.dtype is torch.float32 and logits.stride(1) == 1

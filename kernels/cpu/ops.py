"""Python side of torch.ops.motet_cpu: which tensors the C++ kernels take, and the calls. Import after `build.load()`.

The doors in kernels/ ask `can_*` and else run plain torch; these checks run at every layer of every step, so they are
few.
"""

from __future__ import annotations

import torch

_ops = torch.ops.motet_cpu
_TYPES = frozenset((torch.float32, torch.bfloat16))
_CACHE_TYPES = _TYPES | {torch.int8}

store_kv = _ops.store_kv.default
rotate = _ops.rotate.default
rotate_store_kv = _ops.rotate_store_kv.default
paged_attention = _ops.paged_attention.default
dense_attention = _ops.dense_attention.default
rms_norm = _ops.rms_norm.default
rms_norm_residual = _ops.rms_norm_residual.default
gated = _ops.gated.default
argmax = _ops.argmax.default
sample = _ops.sample.default
snake = _ops.snake.default
snake_unit = _ops.snake_unit.default


def instruction_set() -> str:
    """Which table of kernels is in use: plain, avx2, avx512 or avx512bf16."""
    return str(_ops.instruction_set())


def use_instruction_set(name: str) -> bool:
    """For tests: takes another table from now on; False where this CPU cannot run it."""
    return bool(_ops.use_instruction_set(name))


def can_store(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor) -> bool:
    return (
        k.dtype in _TYPES and kv.dtype in _CACHE_TYPES and k.stride(-1) == 1 and v.stride(-1) == 1 and v.dtype in _TYPES
    )


def can_rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
    return q.dtype in _TYPES and k.dtype in _TYPES and q.stride(-1) == 1 and k.stride(-1) == 1


def can_attend(q: torch.Tensor, kv: torch.Tensor) -> bool:
    return q.dtype in _TYPES and kv.dtype in _CACHE_TYPES and q.stride(-1) == 1


def can_attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    contiguous = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    same = q.dtype is k.dtype is v.dtype is torch.bfloat16 and q.shape == k.shape == v.shape
    return contiguous and same and bool(_ops.has_dense_attention())


def has_bf16_products() -> bool:
    """Whether the chosen table multiplies bf16 (dense attention and joint blocks)."""
    return bool(_ops.has_dense_attention())


def can_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype in _TYPES and weight.dtype in _TYPES and 2 <= x.dim() <= 3 and x.stride(-1) == 1


def can_gate(gate_up: torch.Tensor) -> bool:
    return gate_up.dtype in _TYPES and gate_up.dim() == 2 and gate_up.stride(1) == 1


def can_sample(logits: torch.Tensor) -> bool:
    return logits.dtype is torch.float32 and logits.stride(1) == 1


def can_snake(x: torch.Tensor, alpha: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and alpha.dtype is torch.float32


def can_snake_unit(x: torch.Tensor, alpha: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and alpha.dtype is torch.float32 and x.shape[-1] % 16 == 0

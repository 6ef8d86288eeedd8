"""Layers of which decoders are made, each holding only its shard of the weights.

Plain classes, not `nn.Module`: nothing here is trained, and a decode step of a small model is mostly Python, so calls
stay plain. A layer is made empty from sizes and a `Shard`; `load(reader, ...)` then asks for its slice alone.

Letters: R rows, E hidden size, F intermediate size, V vocabulary, H query heads, K kv heads, D head dim.

Column-parallel layers hold a slice of the outputs and need no communication; row-parallel ones hold a slice of the
inputs and add their partial sums with `comm.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ..kernels.activation import gelu, gelu_tanh_mul, silu_mul
from ..kernels.linear import LinearWeight, embedding, linear
from ..kernels.norm import layer_norm, rms_norm, rms_norm_residual
from .decoder_config import Activation, NormKind
from .spec import Shard
from .weight_reader import Rows, WeightReader


def split_evenly(size: int, shard: Shard, what: str) -> tuple[int, int]:
    """The half-open range of this rank out of `size` equal things."""
    if size % shard.tp_size:
        raise ValueError(f"{what}: expected a multiple of tp_size {shard.tp_size}, got {size}")
    part = size // shard.tp_size
    return shard.tp_rank * part, (shard.tp_rank + 1) * part


def split_kv_heads(num_kv_heads: int, shard: Shard) -> tuple[int, int]:
    """This rank's kv heads. With more ranks than heads, neighbouring ranks hold the same head."""
    if num_kv_heads >= shard.tp_size:
        return split_evenly(num_kv_heads, shard, "num_key_value_heads")
    if shard.tp_size % num_kv_heads:
        raise ValueError(f"expected tp_size {shard.tp_size} to be a multiple of num_key_value_heads {num_kv_heads}")
    head = shard.tp_rank // (shard.tp_size // num_kv_heads)
    return head, head + 1


def all_reduce(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The sum over the ranks of the model."""
    assert shard.comm is not None, "a sharded model needs a comm"
    return cast(torch.Tensor, shard.comm.all_reduce(x))


class Linear:
    """Rows of several checkpoint matrices over one input, fused into one multiplication where their formats agree."""

    __slots__ = ("bias", "weights")

    def __init__(self) -> None:
        self.weights: tuple[LinearWeight, ...] = ()
        self.bias: torch.Tensor | None = None

    def load(
        self, reader: WeightReader, parts: Sequence[Rows], *, bias: bool = False, columns: tuple[int, int] | None = None
    ) -> None:
        """Take `columns` (default all) of the rows of each part, one part below the other."""
        self.weights = reader.matrix(parts, columns=columns)
        self.bias = reader.bias(parts) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] -> [R, out]."""
        weights = self.weights
        if len(weights) == 1:
            return linear(x, weights[0], self.bias)
        out = torch.cat([linear(x, weight) for weight in weights], dim=-1)
        return out if self.bias is None else out + self.bias


class RowParallelLinear:
    """A matrix split over its inputs; the output is whole on every rank. The bias is added once, after the sum."""

    __slots__ = ("inner", "inner_bias", "outer_bias", "shard")

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.inner: LinearWeight | None = None
        self.inner_bias: torch.Tensor | None = None
        self.outer_bias: torch.Tensor | None = None

    def load(self, reader: WeightReader, name: str, columns: tuple[int, int] | None, *, bias: bool = False) -> None:
        packed = reader.matrix([Rows(name)], columns=columns)
        self.inner = packed[0] if packed else None
        tensor = reader.bias([Rows(name)]) if bias else None
        if self.shard.tp_size == 1:
            self.inner_bias = tensor
        else:
            self.outer_bias = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in of this rank] -> [R, out]."""
        assert self.inner is not None
        out = linear(x, self.inner, self.inner_bias)
        if self.shard.tp_size == 1:
            return out
        out = all_reduce(out, self.shard)
        return out if self.outer_bias is None else out + self.outer_bias


class Norm:
    """RMSNorm or LayerNorm over the last dim."""

    __slots__ = ("bias", "eps", "kind", "offset", "weight")

    def __init__(self, kind: NormKind, eps: float, offset: float = 0.0) -> None:
        self.kind = kind
        self.eps = eps
        self.offset = offset
        self.weight: torch.Tensor = torch.empty(0)
        self.bias: torch.Tensor | None = None

    def load(self, reader: WeightReader, prefix: str) -> None:
        self.weight = reader.vector(prefix + ".weight")
        self.bias = reader.vector(prefix + ".bias") if self.kind == "layer" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "rms":
            return rms_norm(x, self.weight, self.eps, offset=self.offset)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def forward_residual(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual) in x's dtype, x + residual) for x [R, E] and residual [R, E] fp32."""
        if self.kind == "rms":
            return rms_norm_residual(x, residual, self.weight, self.eps, self.offset)
        residual = x + residual
        return layer_norm(residual.to(x.dtype), self.weight, self.bias, self.eps), residual


def multiply_gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up for gate_up [R, 2F] -> [R, F]."""
    if activation == "silu":
        return silu_mul(gate_up)
    if activation == "gelu_tanh":
        return gelu_tanh_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    return gelu(x, tanh=activation == "gelu_tanh")


class VocabEmbedding:
    """Embedding rows split over the vocabulary; every rank gets whole rows after the sum."""

    __slots__ = ("dtype", "hi", "lo", "scale", "shard", "weight")

    def __init__(self, vocab_size: int, shard: Shard, scale: float = 1.0) -> None:
        self.shard = shard
        self.lo, self.hi = vocab_range(vocab_size, shard)
        self.scale = scale
        self.weight: LinearWeight | None = None
        self.dtype = torch.float32

    def load(self, reader: WeightReader, name: str, *, with_head: bool = False) -> None:
        """`with_head`: the rows also serve a tied head, so they are packed for multiplication and used from there."""
        if with_head:
            packed = reader.matrix([Rows(name, self.lo, self.hi)], is_head=True)
            self.weight = packed[0] if packed else None
        else:
            self.weight = reader.table(name, self.lo, self.hi)
        self.dtype = reader.dtype
        if self.scale != 1.0:  # transformers rounds Gemma's sqrt(E) to the model's dtype; so do we
            self.scale = float(torch.tensor(self.scale).to(reader.dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [R] int64 -> a new tensor [R, E]."""
        assert self.weight is not None
        if self.shard.tp_size == 1:
            out = embedding(ids, self.weight, self.dtype)
        else:
            mine = (ids >= self.lo) & (ids < self.hi)
            out = embedding((ids - self.lo).clamp_(0, max(self.hi - self.lo - 1, 0)), self.weight, self.dtype)
            out = all_reduce(out * mine[:, None], self.shard)
        return out * self.scale if self.scale != 1.0 else out


class VocabHead:
    """Logits split over the vocabulary, gathered so that every rank has them whole."""

    __slots__ = ("bias", "hi", "lo", "part", "shard", "soft_cap", "vocab_size", "weight")

    def __init__(self, vocab_size: int, shard: Shard, *, soft_cap: float = 0.0) -> None:
        self.shard = shard
        self.vocab_size = vocab_size
        self.lo, self.hi = vocab_range(vocab_size, shard)
        self.part = -(-vocab_size // shard.tp_size)
        self.soft_cap = soft_cap
        self.weight: LinearWeight | None = None
        self.bias: torch.Tensor | None = None

    def load(self, reader: WeightReader, name: str, *, tied: LinearWeight | None = None, bias: bool = False) -> None:
        """From `name`, or over the rows of a tied embedding held by this rank."""
        if tied is None:
            packed = reader.matrix([Rows(name, self.lo, self.hi)], is_head=True)
            tied = packed[0] if packed else None
        self.weight = tied
        self.bias = reader.vector("lm_head.bias", self.lo, self.hi) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, E] -> fp32 [n, V]."""
        assert self.weight is not None
        logits = linear(hidden, self.weight, self.bias, out_dtype=torch.float32)
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        if self.shard.tp_size == 1:
            return logits
        if logits.shape[1] < self.part:  # the last rank's slice, padded to the others' width
            logits = torch.nn.functional.pad(logits, (0, self.part - logits.shape[1]))
        assert self.shard.comm is not None, "a sharded model needs a comm"
        return cast(torch.Tensor, self.shard.comm.all_gather(logits, 1))[:, : self.vocab_size]


def vocab_range(vocab_size: int, shard: Shard) -> tuple[int, int]:
    """This rank's ids; the last rank may hold fewer."""
    part = -(-vocab_size // shard.tp_size)
    return min(shard.tp_rank * part, vocab_size), min((shard.tp_rank + 1) * part, vocab_size)

"""The sparse MLP of Mixtral: a router picks a few experts for each row.

Tensor parallel ranks hold a slice of every expert; with `ep_size` > 1, the same ranks hold some experts whole instead.
Either way one all-reduce adds the parts.
"""

from __future__ import annotations

import torch

from .decoder_config import DecoderConfig
from .layers import Linear, all_reduce, multiply_gate, split_evenly
from .spec import Shard
from .weight_reader import Rows, WeightReader


class SparseMLP:
    """Router and experts of one layer."""

    def __init__(self, config: DecoderConfig, shard: Shard) -> None:
        self.config = config
        self.shard = shard
        if shard.tp_size > 1 and shard.ep_size not in (1, shard.tp_size):
            raise ValueError(f"expected ep_size 1 or tp_size {shard.tp_size}, got {shard.ep_size}")
        self.columns = (0, config.intermediate_size)
        if shard.ep_size == 1:
            self.columns = split_evenly(config.intermediate_size, shard, "intermediate_size")
        if config.num_experts % shard.ep_size:
            raise ValueError(f"expected num_experts {config.num_experts} to be a multiple of ep_size {shard.ep_size}")
        part = config.num_experts // shard.ep_size
        self.experts = range(shard.ep_rank * part, (shard.ep_rank + 1) * part)
        self.router = Linear()
        self.gate_up = [Linear() for _ in self.experts]
        self.down = [Linear() for _ in self.experts]

    def load(self, reader: WeightReader, prefix: str) -> None:
        self.router.load(reader, [Rows(prefix + ".gate")])
        for expert, gate_up, down in zip(self.experts, self.gate_up, self.down, strict=True):
            name = f"{prefix}.experts.{expert}"
            gate_up.load(reader, [Rows(name + ".w1", *self.columns), Rows(name + ".w3", *self.columns)])
            down.load(reader, [Rows(name + ".w2")], columns=self.columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, E] -> [R, E]."""
        k = self.config.experts_per_token
        scores = torch.softmax(self.router.forward(x).float(), dim=-1)
        weights, chosen = scores.topk(k, dim=-1)  # [R, k]
        if self.config.renormalize_experts:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, expert by expert
        rows = order // k
        weights = weights.flatten()[order, None]
        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        out = torch.zeros_like(x)
        start = sum(counts[: self.experts.start])
        for expert, gate_up, down in zip(self.experts, self.gate_up, self.down, strict=True):
            end = start + counts[expert]
            if end > start:
                part = multiply_gate(gate_up.forward(x[rows[start:end]]), self.config.activation)
                # transformers scales in fp32 and rounds once
                part = (down.forward(part) * weights[start:end]).to(x.dtype)
                out.index_add_(0, rows[start:end], part)
            start = end
        return all_reduce(out, self.shard) if self.shard.tp_size > 1 or self.shard.ep_size > 1 else out

"""All layers of a decoder, or some, in one C++ call, for steps of few rows on a CPU (kernels/cpu/layers.cpp).

A decode step is some 200 kernels of a few microseconds; from Python a quarter of its time would go into the calls. The op
runs the same functions in the same order, so its numbers are those of the blocks, bit for bit. It takes decoders of the
common shape: pre-norm RMSNorm, QKV and gate-up in one matrix each, rotary in halves, gated MLP, bf16, one rank. `make_stack`
gives None for any other, and `takes` says whether one step may go this way; the blocks are the way for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels import dispatch
from ..kernels.attention import PagedBatch
from ..kernels.linear import BITS_ZERO, LinearWeight, many_rows

if TYPE_CHECKING:
    from .decoder import Decoder

# What the op measures of itself, in the order of its counters.
PARTS = ("norm", "qkv", "rotary", "attention", "out", "gate_up", "activation", "down")

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class LayerStack:
    """The layers of one decoder, ready for the op. Holds the decoder's own tensors, no copies."""

    def __init__(self, layers: object, max_rows: int) -> None:
        self._layers = layers
        self._max_rows = max_rows
        self.num_layers: int = layers.num_layers()  # type: ignore[attr-defined]
        self._run = torch.ops.motet_cpu.decoder_layers.default
        self._nanoseconds: torch.Tensor | None = None
        self._add: Callable[[str, float], None] | None = None

    def takes(self, hidden: torch.Tensor, kvs: Sequence[torch.Tensor]) -> bool:
        """Whether a step of these rows goes this way."""
        return hidden.shape[0] <= self._max_rows and kvs[0].dtype in (torch.bfloat16, torch.int8)

    def measure(self, add: Callable[[str, float], None]) -> None:
        """From now on give `add` the name and the seconds of each part after every call."""
        self._nanoseconds = torch.zeros(len(PARTS), dtype=torch.int64)
        self._add = add

    def forward(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """hidden bf16 [R, E] -> hidden rows [R, E] after the final norm. `cos_sin` holds one pair per rotary base."""
        return self._call(hidden, batch, kvs, groups, cos_sin, (0, self.num_layers), None)

    def forward_part(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layers: tuple[int, int],
        stream: torch.Tensor,
    ) -> torch.Tensor:
        """Layers `layers[0]` to before `layers[1]` alone, the same numbers as `forward` bit for bit.

        Rows travel from part to part as `stream` [R, E] fp32, changed in place (what it holds before layer 0 is not read),
        and the bf16 rows [R, E] that a part returns and the next gets as `hidden`. The last part returns the normed rows.
        """
        return self._call(hidden, batch, kvs, groups, cos_sin, layers, stream)

    def _call(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layers: tuple[int, int],
        stream: torch.Tensor | None,
    ) -> torch.Tensor:
        rows: torch.Tensor = self._run(
            self._layers,
            hidden,
            kvs,
            groups,
            batch.position,
            batch.slots,
            batch.num_visible,
            batch.block_tables,
            batch.row_starts,
            [cos for cos, _ in cos_sin],
            [sin for _, sin in cos_sin],
            batch.ancestor_mask,
            batch.tree_starts,
            self._nanoseconds,
            *layers,
            stream,
        )
        if self._nanoseconds is not None and self._add is not None:
            for part, count in zip(PARTS, self._nanoseconds.tolist(), strict=True):
                self._add(part, count * 1e-9)
            self._nanoseconds.zero_()
        return rows


def make_stack(decoder: Decoder) -> LayerStack | None:
    """The stack of a loaded decoder, or None where its shape, dtype, device or rank is not the common one."""
    from .decoder import MLP, SequentialBlock

    config, shard = decoder.config, decoder.shard
    if dispatch.cpu_ops() is None or decoder.device.type != "cpu" or decoder.dtype is not torch.bfloat16:
        return None
    if shard.tp_size != 1 or not (decoder.is_first and decoder.is_last) or not config.gated_mlp:
        return None
    if config.norm != "rms" or config.qk_norm not in (None, "rms") or config.activation not in _ACTIVATIONS:
        return None
    rotary = [rope for rope in decoder.rope_index if rope >= 0]
    if len(rotary) != len(decoder.blocks):
        return None
    first = decoder.blocks[0].attention
    layers = torch.classes.motet_cpu.Layers(
        first.num_heads,
        first.num_kv_heads,
        first.head_dim,
        first.scale,
        first.soft_cap,
        config.norm_eps,
        config.norm_offset,
        _ACTIVATIONS[config.activation],
        decoder.norm.weight,
    )
    max_rows = 1 << 30
    for block, rope in zip(decoder.blocks, rotary, strict=True):
        if not isinstance(block, SequentialBlock) or not isinstance(block.mlp, MLP):
            return None
        attention, mlp = block.attention, block.mlp
        layers.add_layer(
            block.attention_norm.weight,
            block.mlp_norm.weight,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            rope,
            attention.window,
        )
        matrices = (
            (attention.qkv.weights, attention.qkv.bias),
            ((attention.out.inner,), attention.out.inner_bias),
            (mlp.up.weights, mlp.up.bias),
            ((mlp.down.inner,), mlp.down.inner_bias),
        )
        for which, (parts, bias) in enumerate(matrices):
            if bias is not None and len(parts) != 1:
                return None  # the layer adds it to rounded sums then
            for weight in parts:
                if weight is None or weight.layout != "rows16":
                    return None
                layers.add_part(which, *_arguments(weight, bias))
                max_rows = min(max_rows, many_rows(weight.format))
        layers.check_layer(config.hidden_size)
    return LayerStack(layers, max_rows)


def _arguments(weight: LinearWeight, bias: torch.Tensor | None) -> tuple[object, ...]:
    """A weight in layout rows16 as the C++ functions take it."""
    t = weight.tensors
    return (t["quants"], t.get("scale"), t.get("minimum"), bias, *BITS_ZERO[weight.format], weight.out_features)

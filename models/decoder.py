"""Causal decoders over the paged cache: Llama, Mistral, Qwen2/3, SmolLM, Gemma 1-3, Phi, Phi-3, Mixtral.

Ids in, hidden rows out. Rows of many sequences come together in one `PagedBatch`; the model knows neither requests nor
phases. A family is a `DecoderConfig` and one of three block shapes:

    sequential   x + attention(norm(x)), then x + mlp(norm(x))                      Llama and most others
    sandwich     as above, with a second norm after attention and after mlp         Gemma 2, 3
    parallel     x + attention(norm(x)) + mlp(norm(x)), one norm for both           Phi

Blocks pass (x, residual) on instead of x + residual, so that each addition is fused with the norm that follows it, and so
that the sum over all layers is kept in fp32 whatever the dtype of the rows.

Letters: R rows, E hidden size, F intermediate size, V vocabulary, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from ..kernels.attention import PagedBatch, paged_attention, store_kv
from ..kernels.linear import LinearWeight
from ..kernels.rotary import Rotary, rotary_store_kv
from .decoder_config import DecoderConfig
from .layer_stack import LayerStack, make_stack
from .layers import (
    Linear,
    Norm,
    RowParallelLinear,
    VocabEmbedding,
    VocabHead,
    activate,
    multiply_gate,
    split_evenly,
    split_kv_heads,
)
from .moe import SparseMLP
from .spec import WHOLE, AttentionWork, KVSpec, Shard, Workload
from .weight_reader import Rows, WeightReader

CosSin = tuple[torch.Tensor, torch.Tensor]


class Attention:
    """Self-attention of one layer: QKV in one multiplication, K and V stored, then attention over the pages."""

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard) -> None:
        self.config = config
        self.head_dim = config.head_dim
        self.heads = split_evenly(config.num_heads, shard, "num_attention_heads")
        self.kv_heads = split_kv_heads(config.num_kv_heads, shard)
        self.num_heads = self.heads[1] - self.heads[0]
        self.num_kv_heads = self.kv_heads[1] - self.kv_heads[0]
        self.scale = config.scale
        self.window = config.windows[layer]
        self.soft_cap = config.attn_soft_cap
        self.qkv = Linear()
        self.out = RowParallelLinear(shard)
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm is not None:
            self.q_norm = Norm(config.qk_norm, config.norm_eps, config.norm_offset)
            self.k_norm = Norm(config.qk_norm, config.norm_eps, config.norm_offset)

    def load(self, reader: WeightReader, prefix: str) -> None:
        config, dim = self.config, self.head_dim
        query = (self.heads[0] * dim, self.heads[1] * dim)
        key = (self.kv_heads[0] * dim, self.kv_heads[1] * dim)
        if config.packed:
            after_q, after_k = config.num_heads * dim, (config.num_heads + config.num_kv_heads) * dim
            name = prefix + ".qkv_proj"
            parts = [
                Rows(name, *query),
                Rows(name, after_q + key[0], after_q + key[1]),
                Rows(name, after_k + key[0], after_k + key[1]),
            ]
        else:
            parts = [Rows(prefix + ".q_proj", *query), Rows(prefix + ".k_proj", *key), Rows(prefix + ".v_proj", *key)]
        self.qkv.load(reader, parts, bias=config.qkv_bias)
        phi = config.family == "phi"
        self.out.load(reader, prefix + (".dense" if phi else ".o_proj"), query, bias=config.out_bias)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.load(reader, prefix + (".q_layernorm" if phi else ".q_norm"))
            self.k_norm.load(reader, prefix + (".k_layernorm" if phi else ".k_norm"))

    def forward(
        self, x: torch.Tensor, cos_sin: CosSin | None, batch: PagedBatch, kv: torch.Tensor, group: int
    ) -> torch.Tensor:
        """x [R, E] -> [R, E]; stores this step's K and V in `kv`. `cos_sin` None: a layer without rotary."""
        num_rows, H, K = x.shape[0], self.num_heads, self.num_kv_heads
        qkv = self.qkv.forward(x).view(num_rows, H + 2 * K, self.head_dim)
        q, k, v = qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(q), self.k_norm.forward(k)
        if cos_sin is None:
            store_kv(k, v, kv, batch.slots[group])
        else:
            q = rotary_store_kv(q, k, v, cos_sin[0], cos_sin[1], kv, batch.slots[group])
        out = paged_attention(q, kv, batch, group, scale=self.scale, window=self.window, soft_cap=self.soft_cap)
        return self.out.forward(out.view(num_rows, H * self.head_dim))


class MLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) for a family without a gate."""

    def __init__(self, config: DecoderConfig, shard: Shard) -> None:
        self.config = config
        self.columns = split_evenly(config.intermediate_size, shard, "intermediate_size")
        self.up = Linear()  # gate above up, [2F, E], where there is a gate
        self.down = RowParallelLinear(shard)

    def load(self, reader: WeightReader, prefix: str) -> None:
        config, (lo, hi), size = self.config, self.columns, self.config.intermediate_size
        down = prefix + ".down_proj"
        if not config.gated_mlp:
            parts, down = [Rows(prefix + ".fc1", lo, hi)], prefix + ".fc2"
        elif config.packed:
            name = prefix + ".gate_up_proj"
            parts = [Rows(name, lo, hi), Rows(name, size + lo, size + hi)]
        else:
            parts = [Rows(prefix + ".gate_proj", lo, hi), Rows(prefix + ".up_proj", lo, hi)]
        self.up.load(reader, parts, bias=config.mlp_bias)
        self.down.load(reader, down, self.columns, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, E] -> [R, E]."""
        x = self.up.forward(x)
        activation = self.config.activation
        return self.down.forward(multiply_gate(x, activation) if self.config.gated_mlp else activate(x, activation))


class SequentialBlock:
    """Pre-norm attention, then pre-norm MLP or mixture of experts."""

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard) -> None:
        self.attention = Attention(config, layer, shard)
        self.mlp: MLP | SparseMLP = SparseMLP(config, shard) if config.num_experts else MLP(config, shard)
        self.attention_norm = Norm(config.norm, config.norm_eps, config.norm_offset)
        self.mlp_norm = Norm(config.norm, config.norm_eps, config.norm_offset)

    def load(self, reader: WeightReader, prefix: str) -> None:
        self.attention.load(reader, prefix + ".self_attn")
        self.mlp.load(reader, prefix + (".block_sparse_moe" if isinstance(self.mlp, SparseMLP) else ".mlp"))
        self.attention_norm.load(reader, prefix + ".input_layernorm")
        self.mlp_norm.load(reader, prefix + ".post_attention_layernorm")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: CosSin | None,
        batch: PagedBatch,
        kv: torch.Tensor,
        group: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual), both [R, E], whose sum is the stream; the first block gets residual None."""
        if residual is None:
            x, residual = self.attention_norm.forward(x), x.float()
        else:
            x, residual = self.attention_norm.forward_residual(x, residual)
        x = self.attention.forward(x, cos_sin, batch, kv, group)
        x, residual = self.mlp_norm.forward_residual(x, residual)
        return self.mlp.forward(x), residual


class SandwichBlock:
    """As SequentialBlock, with one more norm on what attention and MLP add to the stream."""

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard) -> None:
        self.attention = Attention(config, layer, shard)
        self.mlp = MLP(config, shard)
        self.attention_norm = Norm(config.norm, config.norm_eps, config.norm_offset)
        self.attention_out_norm = Norm(config.norm, config.norm_eps, config.norm_offset)
        self.mlp_norm = Norm(config.norm, config.norm_eps, config.norm_offset)
        self.mlp_out_norm = Norm(config.norm, config.norm_eps, config.norm_offset)

    def load(self, reader: WeightReader, prefix: str) -> None:
        self.attention.load(reader, prefix + ".self_attn")
        self.mlp.load(reader, prefix + ".mlp")
        self.attention_norm.load(reader, prefix + ".input_layernorm")
        self.attention_out_norm.load(reader, prefix + ".post_attention_layernorm")
        self.mlp_norm.load(reader, prefix + ".pre_feedforward_layernorm")
        self.mlp_out_norm.load(reader, prefix + ".post_feedforward_layernorm")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: CosSin | None,
        batch: PagedBatch,
        kv: torch.Tensor,
        group: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual), both [R, E], whose sum is the stream; the first block gets residual None."""
        if residual is None:
            x, residual = self.attention_norm.forward(x), x.float()
        else:
            x, residual = self.attention_norm.forward_residual(x, residual)
        x = self.attention_out_norm.forward(self.attention.forward(x, cos_sin, batch, kv, group))
        x, residual = self.mlp_norm.forward_residual(x, residual)
        return self.mlp_out_norm.forward(self.mlp.forward(x)), residual


class ParallelBlock:
    """Attention and MLP side by side on the same normed rows."""

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard) -> None:
        self.attention = Attention(config, layer, shard)
        self.mlp = MLP(config, shard)
        self.norm = Norm(config.norm, config.norm_eps, config.norm_offset)

    def load(self, reader: WeightReader, prefix: str) -> None:
        self.attention.load(reader, prefix + ".self_attn")
        self.mlp.load(reader, prefix + ".mlp")
        self.norm.load(reader, prefix + ".input_layernorm")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: CosSin | None,
        batch: PagedBatch,
        kv: torch.Tensor,
        group: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual), both [R, E], whose sum is the stream; the first block gets residual None."""
        if residual is None:
            x, residual = self.norm.forward(x), x.float()
        else:
            x, residual = self.norm.forward_residual(x, residual)
        return self.attention.forward(x, cos_sin, batch, kv, group) + self.mlp.forward(x), residual


Block = SequentialBlock | SandwichBlock | ParallelBlock
BLOCKS: dict[str, type[Block]] = {"sequential": SequentialBlock, "sandwich": SandwichBlock, "parallel": ParallelBlock}


class Decoder:
    """A decoder, or this rank's shard of one. Made empty; `load` fills it. Call under `torch.inference_mode()`.

    With `shard.layers`, it holds those layers alone: only the first part embeds, only the last norms and has logits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shard: Shard = WHOLE,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.shard = shard
        self.dtype = dtype
        self.device = torch.device(device)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position = config.max_position
        self.first_layer, self.last_layer = shard.layers or (0, config.num_layers)
        self.is_first = self.first_layer == 0
        self.is_last = self.last_layer == config.num_layers
        make = BLOCKS[config.block]
        self.blocks: list[Block] = [make(config, layer, shard) for layer in range(self.first_layer, self.last_layer)]
        self.rope_index = config.rope_index[self.first_layer : self.last_layer]
        self.ropes = [
            Rotary(
                config.head_dim,
                rope.parameters,
                config.max_position,
                rope.theta,
                rope.partial_rotary_factor,
                device=self.device,
            )
            for rope in config.ropes
        ]
        self.embedding = VocabEmbedding(config.vocab_size, shard, config.embed_scale)
        self.norm = Norm(config.norm, config.norm_eps, config.norm_offset)
        self.head = VocabHead(config.vocab_size, shard, soft_cap=config.logit_soft_cap)
        self.weight_bytes = 0
        self.stack: LayerStack | None = None  # all layers as one call, where that is possible

    def load(self, reader: WeightReader) -> None:
        """Take this shard's weights from `reader`."""
        for layer, block in zip(range(self.first_layer, self.last_layer), self.blocks, strict=True):
            block.load(reader, f"model.layers.{layer}")
        tied = self.config.tie_embeddings
        if self.is_first or (self.is_last and tied):  # a last part with a tied head needs the rows too
            self.embedding.load(reader, "model.embed_tokens", with_head=tied and self.is_last)
        if self.is_last:
            self.norm.load(reader, "model.final_layernorm" if self.config.family == "phi" else "model.norm")
            self.head.load(reader, "lm_head", tied=self.embedding.weight if tied else None, bias=self.config.head_bias)
        self.weight_bytes = reader.num_bytes
        self.stack = make_stack(self)

    def kv_specs(self) -> list[KVSpec]:
        """KV needs of each layer held here, in order."""
        specs = []
        for layer in range(self.first_layer, self.last_layer):
            attention = self.blocks[layer - self.first_layer].attention
            specs.append(
                KVSpec(
                    kind="window" if attention.window else "full",
                    num_kv_heads=attention.num_kv_heads,
                    head_dim=attention.head_dim,
                    window=attention.window,
                )
            )
        return specs

    def matrices(self) -> list[LinearWeight]:
        """The layers' matrices that every row meets, in order. Experts are left out: which ones a row meets varies."""
        found: list[LinearWeight | None] = []
        for block in self.blocks:
            found += [*block.attention.qkv.weights, block.attention.out.inner]
            if isinstance(block.mlp, MLP):
                found += [*block.mlp.up.weights, block.mlp.down.inner]
        return [weight for weight in found if weight is not None]

    def workload(self, kv_row_bytes: int) -> Workload | None:
        """What a step reads and multiplies; None for experts, of which a step reads as many as its rows choose.

        `kv_row_bytes`: of one head's K, or V, of one kv index in the cache.
        """
        if self.config.num_experts:
            return None
        matrices, head = self.matrices(), self.head.weight if self.is_last else None
        windows: dict[int, list[Attention]] = {}
        for block in self.blocks:
            windows.setdefault(block.attention.window, []).append(block.attention)
        return Workload(
            num_layers=len(self.blocks),
            layer_bytes=sum(weight.num_bytes for weight in matrices),
            layer_products=sum(weight.out_features * weight.in_features for weight in matrices),
            head_bytes=head.num_bytes if head is not None else 0,
            head_products=head.out_features * head.in_features if head is not None else 0,
            attention=tuple(
                AttentionWork(
                    window=window,
                    kv_bytes=sum(2 * a.num_kv_heads for a in layers) * kv_row_bytes,
                    products=sum(2 * a.num_heads * a.head_dim for a in layers),
                )
                for window, layers in windows.items()
            ),
        )

    def embed(self, ids: torch.Tensor, side: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """ids [R] int64 -> [R, E]. `side` = (row indices [n] int64, embeddings [n, E]) replaces those rows.

        A replaced row's id is never looked up, so it may be any number; the model's embedding scale does not touch it.
        """
        if side is None:
            return self.embedding.forward(ids)
        rows, embeddings = side
        hidden = self.embedding.forward(ids.index_fill(0, rows, 0))
        return hidden.index_copy_(0, rows, embeddings.to(hidden.dtype))

    @overload
    def forward(
        self, hidden: torch.Tensor, batch: PagedBatch, kvs: Sequence[torch.Tensor], groups: Sequence[int]
    ) -> torch.Tensor: ...
    @overload
    def forward(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        *,
        aux_hidden: tuple[int, ...],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]: ...

    def forward(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        *,
        aux_hidden: tuple[int, ...] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """hidden [R, E] -> hidden rows [R, E] after the final norm.

        kvs and groups name the cache tensor and the block-table group of each layer held here. `hidden` may be
        overwritten. With `aux_hidden` (even empty) comes a dict besides: the stream [R, E] as it enters those layers
        (0 = the embeddings, `num_layers` = before the final norm).
        """
        tables = [rope.cos_sin(batch.position) for rope in self.ropes]  # one per rotary base, shared by all layers
        if self.stack is not None and aux_hidden is None and self.stack.takes(hidden, kvs):
            return self.stack.forward(hidden, batch, kvs, groups, tables)
        aux: dict[int, torch.Tensor] = {}
        wanted = aux_hidden or ()
        x, residual = hidden, None
        layer = self.first_layer
        for block, kv, group, rope in zip(self.blocks, kvs, groups, self.rope_index, strict=True):
            if layer in wanted:
                aux[layer] = x.clone() if residual is None else x + residual
            x, residual = block.forward(x, residual, tables[rope] if rope >= 0 else None, batch, kv, group)
            layer += 1
        if layer in wanted:
            aux[layer] = x if residual is None else (x + residual).to(x.dtype)
        if not self.is_last:
            x = x if residual is None else (x + residual).to(x.dtype)
        elif residual is None:
            x = self.norm.forward(x)
        else:
            x, _ = self.norm.forward_residual(x, residual)
        return x if aux_hidden is None else (x, aux)

    @property
    def part_layers(self) -> int:
        """Layers that `forward_part` can take some of; 0 where rows pass all of them or none."""
        return self.stack.num_layers if self.stack is not None else 0

    def forward_part(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        *,
        layers: tuple[int, int],
        stream: torch.Tensor,
    ) -> torch.Tensor:
        """Some layers of `forward`; see LayerStack.forward_part. Only where `part_layers` is not 0."""
        assert self.stack is not None
        tables = [rope.cos_sin(batch.position) for rope in self.ropes]
        return self.stack.forward_part(hidden, batch, kvs, groups, tables, layers, stream)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden rows [n, E] -> fp32 [n, V], whole on every rank."""
        return self.head.forward(hidden)

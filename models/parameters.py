"""Names and shapes of a decoder's parameters as `transformers` checkpoints spell them, and sources made of memory.

The list serves twice: a file is checked against it before anything is read, and random models are made from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from .decoder_config import DecoderConfig
from .loader import check_names

Shapes = dict[str, tuple[int, ...]]

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", "rope_freqs.weight")  # tables that some files carry; we compute our own


def parameter_shapes(config: DecoderConfig) -> Shapes:
    """Every parameter of the whole model; matrices are [out, in]."""
    hidden = config.hidden_size
    phi = config.family == "phi"
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        _attention(shapes, config, prefix + ".self_attn")
        if config.num_experts:
            _experts(shapes, config, prefix + ".block_sparse_moe")
        else:
            _mlp(shapes, config, prefix + ".mlp")
        norms = {
            "sequential": ("input_layernorm", "post_attention_layernorm"),
            "sandwich": (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            "parallel": ("input_layernorm",),
        }[config.block]
        for norm in norms:
            _norm(shapes, f"{prefix}.{norm}", hidden, config.norm == "layer")
    _norm(shapes, "model.final_layernorm" if phi else "model.norm", hidden, config.norm == "layer")
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def check_parameters(names: set[str], config: DecoderConfig) -> None:
    """Raise ModelLoadError listing what a checkpoint lacks and what it holds beyond the model."""
    optional = {name for name in names if name.endswith(_IGNORED_SUFFIXES)}
    if config.tie_embeddings:
        optional.add("lm_head.weight")  # some files write the tied copy
    check_names(parameter_shapes(config), names, optional=optional)


def _matrix(shapes: Shapes, name: str, rows: int, columns: int, bias: bool) -> None:
    shapes[name + ".weight"] = (rows, columns)
    if bias:
        shapes[name + ".bias"] = (rows,)


def _norm(shapes: Shapes, name: str, size: int, bias: bool) -> None:
    shapes[name + ".weight"] = (size,)
    if bias:
        shapes[name + ".bias"] = (size,)


def _attention(shapes: Shapes, config: DecoderConfig, prefix: str) -> None:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    phi = config.family == "phi"
    if config.packed:
        _matrix(shapes, prefix + ".qkv_proj", query + 2 * key, config.hidden_size, config.qkv_bias)
    else:
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            _matrix(shapes, f"{prefix}.{name}", rows, config.hidden_size, config.qkv_bias)
    _matrix(shapes, prefix + (".dense" if phi else ".o_proj"), config.hidden_size, query, config.out_bias)
    if config.qk_norm is not None:
        for name in ("q_layernorm", "k_layernorm") if phi else ("q_norm", "k_norm"):
            _norm(shapes, f"{prefix}.{name}", config.head_dim, config.qk_norm == "layer")


def _mlp(shapes: Shapes, config: DecoderConfig, prefix: str) -> None:
    hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    if not config.gated_mlp:
        _matrix(shapes, prefix + ".fc1", size, hidden, bias)
        _matrix(shapes, prefix + ".fc2", hidden, size, bias)
        return
    if config.packed:
        _matrix(shapes, prefix + ".gate_up_proj", 2 * size, hidden, bias)
    else:
        _matrix(shapes, prefix + ".gate_proj", size, hidden, bias)
        _matrix(shapes, prefix + ".up_proj", size, hidden, bias)
    _matrix(shapes, prefix + ".down_proj", hidden, size, bias)


def _experts(shapes: Shapes, config: DecoderConfig, prefix: str) -> None:
    hidden, size = config.hidden_size, config.intermediate_size
    shapes[prefix + ".gate.weight"] = (config.num_experts, hidden)
    for expert in range(config.num_experts):
        name = f"{prefix}.experts.{expert}"
        shapes |= {
            name + ".w1.weight": (size, hidden),
            name + ".w3.weight": (size, hidden),
            name + ".w2.weight": (hidden, size),
        }


class TensorSource:
    """A weight source over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> torch.Tensor:
        return self._tensors[name].narrow(dim, lo, hi - lo)


class RandomSource:
    """A weight source that makes up parameters from (seed, name) alone, so that shards of one seed fit together."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self._shapes = shapes
        self._seed = seed

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        key = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        noise = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            return noise * 0.1
        if len(shape) == 1:
            return 1.0 + noise * 0.1
        # An embedding of unit rows keeps tied logits apart; a matrix keeps the scale of what it is given.
        return noise if "embed_tokens" in name else noise * shape[1] ** -0.5

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> torch.Tensor:
        return self.get(name).narrow(dim, lo, hi - lo)

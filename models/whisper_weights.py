"""Whisper's parameters: names and shapes (transformers' names), and the layers they are read into.

The decoder's matrices are packed for few rows (kernels/linear.py); the encoder works on 1500 rows at a time, so its
matrices stay plain and in the compute dtype, unless they are 8-bit ones that the kernels multiply as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.linear import LinearWeight, dequantize, linear, multiplies_bytes
from .parameters import Shapes
from .weight_reader import Rows, WeightReader
from .whisper_config import WhisperConfig


def parameter_shapes(config: WhisperConfig) -> Shapes:
    """Every parameter that must be there."""
    hidden = config.hidden
    shapes: Shapes = {
        "model.encoder.conv1.weight": (hidden, config.num_mels, 3),
        "model.encoder.conv1.bias": (hidden,),
        "model.encoder.conv2.weight": (hidden, hidden, 3),
        "model.encoder.conv2.bias": (hidden,),
        "model.encoder.embed_positions.weight": (config.num_audio_positions, hidden),
        "model.decoder.embed_tokens.weight": (config.vocab_size, hidden),
        "model.decoder.embed_positions.weight": (config.num_text_positions, hidden),
    }
    sides = {
        "encoder": (config.encoder_layers, config.encoder_ffn, ("self_attn",)),
        "decoder": (config.layers, config.decoder_ffn, ("self_attn", "encoder_attn")),
    }
    for side, (num_layers, ffn, attentions) in sides.items():
        _norm(shapes, f"model.{side}.layer_norm", hidden)
        for layer in range(num_layers):
            prefix = f"model.{side}.layers.{layer}."
            for attention in attentions:
                for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{prefix}{attention}.{name}.weight"] = (hidden, hidden)
                    if name != "k_proj":
                        shapes[f"{prefix}{attention}.{name}.bias"] = (hidden,)
                _norm(shapes, f"{prefix}{attention}_layer_norm", hidden)
            _norm(shapes, prefix + "final_layer_norm", hidden)
            shapes |= {
                f"{prefix}fc1.weight": (ffn, hidden),
                f"{prefix}fc1.bias": (ffn,),
                f"{prefix}fc2.weight": (hidden, ffn),
                f"{prefix}fc2.bias": (hidden,),
            }
    return shapes


def optional_names(names: set[str]) -> set[str]:
    """Of `names`, those that may be there unread: the tied head, and the zero biases of keys."""
    return {name for name in names if name == "proj_out.weight" or name.endswith("k_proj.bias")}


def _norm(shapes: Shapes, name: str, hidden: int) -> None:
    shapes[name + ".weight"] = shapes[name + ".bias"] = (hidden,)


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """x W^T + b, packed for few rows or in 8 bits."""

    weight: LinearWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """x W^T + b for many rows."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """In fp32, whatever the model's dtype: the residual stream is fp32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-5).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    norm: LayerNorm
    qkv: Dense | Affine
    out: Dense | Affine
    ffn_norm: LayerNorm
    up: Dense | Affine
    down: Dense | Affine


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    norm: LayerNorm
    qkv: Affine
    out: Affine
    cross_norm: LayerNorm
    cross_q: Affine
    cross_kv: Dense | Affine  # runs over 1500 rows, once a window
    cross_out: Affine
    ffn_norm: LayerNorm
    up: Affine
    down: Affine


def read_norm(reader: WeightReader, name: str) -> LayerNorm:
    return LayerNorm(reader.vector(name + ".weight").float(), reader.vector(name + ".bias").float())


def read_head(reader: WeightReader, name: str) -> LinearWeight:
    """The token embedding, packed to serve as the head too."""
    return reader.matrix([Rows(name)], is_head=True)[0]


def read_encoder_layer(reader: WeightReader, prefix: str) -> EncoderLayer:
    attention = prefix + "self_attn."
    return EncoderLayer(
        norm=read_norm(reader, prefix + "self_attn_layer_norm"),
        qkv=_many_rows(reader, [attention + name for name in ("q_proj", "k_proj", "v_proj")]),
        out=_many_rows(reader, [attention + "out_proj"]),
        ffn_norm=read_norm(reader, prefix + "final_layer_norm"),
        up=_many_rows(reader, [prefix + "fc1"]),
        down=_many_rows(reader, [prefix + "fc2"]),
    )


def read_decoder_layer(reader: WeightReader, prefix: str) -> DecoderLayer:
    attention, cross = prefix + "self_attn.", prefix + "encoder_attn."
    return DecoderLayer(
        norm=read_norm(reader, prefix + "self_attn_layer_norm"),
        qkv=_affine(reader, [attention + name for name in ("q_proj", "k_proj", "v_proj")]),
        out=_affine(reader, [attention + "out_proj"]),
        cross_norm=read_norm(reader, prefix + "encoder_attn_layer_norm"),
        cross_q=_affine(reader, [cross + "q_proj"]),
        cross_kv=_many_rows(reader, [cross + "k_proj", cross + "v_proj"]),
        cross_out=_affine(reader, [cross + "out_proj"]),
        ffn_norm=read_norm(reader, prefix + "final_layer_norm"),
        up=_affine(reader, [prefix + "fc1"]),
        down=_affine(reader, [prefix + "fc2"]),
    )


def _affine(reader: WeightReader, names: Sequence[str]) -> Affine:
    packed = reader.matrix([Rows(name) for name in names])
    assert len(packed) == 1, "the matrices of one input have one format"
    return Affine(packed[0], _bias(reader, names))


def _many_rows(reader: WeightReader, names: Sequence[str]) -> Dense | Affine:
    """In 8 bits where the matrices are stored so or `quantize` asks for it, and the kernels gain by it."""
    if reader.dtype is torch.bfloat16 and reader.device.type == "cpu":
        before = reader.num_bytes
        packed = _affine(reader, names)
        if multiplies_bytes(packed.weight):
            return packed
        reader.num_bytes = before
    return _dense(reader, names)


def _dense(reader: WeightReader, names: Sequence[str]) -> Dense:
    tables = [reader.table(name, 0, reader.shapes[name + ".weight"][0]) for name in names]
    weight = torch.cat([dequantize(table, reader.dtype) for table in tables])
    # The reader has counted what is stored; what is kept may be wider.
    reader.num_bytes += weight.numel() * weight.element_size() - sum(table.num_bytes for table in tables)
    return Dense(weight, _bias(reader, names))


def _bias(reader: WeightReader, names: Sequence[str]) -> Tensor:
    """Keys have none: a constant added to every score of a row changes nothing."""
    parts = [
        torch.zeros(reader.shapes[name + ".weight"][0], dtype=reader.dtype, device=reader.device)
        if name.endswith("k_proj")
        else reader.vector(name + ".bias")
        for name in names
    ]
    return torch.cat(parts)

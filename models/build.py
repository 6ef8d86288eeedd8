"""From a config dict and a weight source to a model that the engine can run.

`build_model` picks our own decoder for the families of decoder_config.py, else the transformers backend, else refuses
by name. Both offer the same methods: embed, forward, logits, kv_specs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import torch

from ..engine.errors import ModelLoadError
from ..kernels.attention import PagedBatch
from .decoder import Decoder
from .decoder_config import FAMILIES, DecoderConfig
from .loader import WeightSource
from .multi_codebook import MULTI_CODEBOOK, load_multi_codebook
from .parameters import RandomSource, check_parameters, parameter_shapes
from .spec import WHOLE, KVSpec, Shard
from .weight_reader import Quantize, WeightReader, WeightsMode


class CausalModel(Protocol):
    """What the engine needs of a model; see `Decoder` for the words."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    hidden_size: int
    max_position: int
    weight_bytes: int

    def kv_specs(self) -> list[KVSpec]: ...
    def embed(self, ids: torch.Tensor, side: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor: ...
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
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config multiplies by our kernels: not on the transformers backend."""
    return config.get("model_type") in FAMILIES or config.get("model_type") in MULTI_CODEBOOK


def build_model(
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    shard: Shard = WHOLE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    weights: WeightsMode = "keep",
    quantize: Quantize | None = None,
    invariant: bool = False,
) -> CausalModel:
    """The model of a `transformers`-style config dict with the weights of `source`, or this shard of it.

    weights   "keep": GGUF blocks stay quantized in memory; "dequantize": everything in `dtype`
    quantize  make float matrices int8, int4 or fp8 while loading
    invariant  a row's numbers never depend on the other rows (fp32 on a CPU, our own decoder)

    Raises ModelLoadError for an unsupported architecture, unusable config, missing or unexpected weights.
    """
    if config.get("model_type") in MULTI_CODEBOOK:
        return load_multi_codebook(
            config, source, shard=shard, dtype=dtype, device=device, quantize=quantize, invariant=invariant
        )
    if config.get("model_type") not in FAMILIES:
        if invariant:
            raise ModelLoadError(
                f"deterministic: not for model type {str(config.get('model_type'))[:40]!r}, which runs on the "
                "transformers backend"
            )
        from .transformers_backend import TransformersModel  # slow to import, and rarely needed

        return TransformersModel(config, source, shard=shard, dtype=dtype, device=device)
    try:
        model = Decoder(DecoderConfig.from_dict(config), shard, dtype=dtype, device=device)
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # a stranger's file
        raise error if isinstance(error, ModelLoadError) else ModelLoadError(f"config: {error}") from None
    check_parameters(source.names(), model.config)
    model.load(
        WeightReader(
            source,
            parameter_shapes(model.config),
            dtype=dtype,
            device=device,
            weights=weights,
            quantize=quantize,
            invariant=invariant,
        )
    )
    return model


def random_model(
    config: Mapping[str, Any],
    seed: int = 0,
    *,
    shard: Shard = WHOLE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantize: Quantize | None = None,
) -> Decoder:
    """A decoder of this config with random weights, for tests and measurements. Shards of one seed fit together."""
    model = Decoder(DecoderConfig.from_dict(config), shard, dtype=dtype, device=device)
    shapes = parameter_shapes(model.config)
    model.load(WeightReader(RandomSource(shapes, seed), shapes, dtype=dtype, device=device, quantize=quantize))
    return model

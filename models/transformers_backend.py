"""Another causal LM of `transformers` on our paged attention.

The model is `transformers`' own code; only its attention is ours, registered under a name of our own, and everything
that a call needs travels in keyword arguments: no ambient context. At load a probe runs the model once on the meta
device and writes down what each layer asks of the cache, so an architecture that does more than causal attention over
one KV pair per layer (latent, recurrent, chunked, cross...) is refused by name, before any weight is read.

Does not shard, quantize, or run remote code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..engine.errors import ModelLoadError
from ..kernels.attention import PagedBatch, paged_attention, store_kv
from ..kernels.linear import LinearWeight, dequantize
from .loader import WeightSource, check_names
from .spec import WHOLE, KVSpec, Shard

ATTENTION_NAME = "motet_paged"


@dataclass(frozen=True)
class Step:
    """What one forward hands to every attention call. Sequences are indexed by layer."""

    batch: PagedBatch
    kvs: Sequence[torch.Tensor]
    groups: Sequence[int]


@dataclass
class Probe:
    """Stands in for a Step and records what each layer asks for; `trouble` is the first thing that we cannot do."""

    specs: dict[int, KVSpec] = field(default_factory=dict)
    trouble: str = ""

    def record(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor, mask: object, window: int) -> None:
        layer = getattr(module, "layer_idx", None)
        if key.shape != value.shape:
            self.trouble = self.trouble or "keys and values of different shape (latent attention)"
        elif not isinstance(layer, int) or layer in self.specs:
            self.trouble = self.trouble or f"layer {layer} attends more than once"
        elif mask is not None or not getattr(module, "is_causal", True):
            self.trouble = self.trouble or "attention that is not plainly causal"
        else:
            self.specs[layer] = KVSpec(
                kind="window" if window else "full", num_kv_heads=key.shape[1], head_dim=key.shape[3], window=window
            )


def paged_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    motet_step: Step | Probe | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as `transformers` calls it: query [1, H, R, D], key and value [1, K, R, D] -> ([1, R, H, D], None)."""
    if isinstance(motet_step, Probe):
        motet_step.record(module, key, value, attention_mask, sliding_window or 0)
        return query.transpose(1, 2)[..., : value.shape[-1]], None
    if motet_step is None:
        raise ValueError(f"{ATTENTION_NAME} attention needs motet_step; the model does not pass its keywords on")
    layer: int = module.layer_idx  # type: ignore[assignment]
    kv, group = motet_step.kvs[layer], motet_step.groups[layer]
    store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), kv, motet_step.batch.slots[group])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.float()
    out = paged_attention(
        query[0].transpose(0, 1),
        kv,
        motet_step.batch,
        group,
        scale=scale,
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
        sinks=sinks,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_interface)


class HiddenIsOutput(nn.Module):
    """In the place of a model's body: hands its input on, so that the head runs alone, with all its scales and caps."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersModel:
    """A causal LM with the methods of `Decoder`. Call under `torch.inference_mode()`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        source: WeightSource,
        *,
        shard: Shard = WHOLE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ModelLoadError for an architecture that the cache cannot serve and for weights that do not fit."""
        if shard.tp_size > 1 or shard.ep_size > 1 or shard.layers is not None:
            raise ModelLoadError(f"{config.get('model_type')}: the transformers backend does not shard")
        self.dtype = dtype
        self.device = torch.device(device)
        model_class, self.config = _find(config)
        with torch.device("meta"):
            skeleton = model_class._from_config(copy.deepcopy(self.config), attn_implementation=ATTENTION_NAME)
        self._specs = _probe(skeleton, self.config)
        self.vocab_size = int(self.config.vocab_size)
        self.hidden_size = int(self.config.hidden_size)
        self.max_position = int(getattr(self.config, "max_position_embeddings", None) or 2048)
        with no_init_weights():
            model = model_class._from_config(self.config, attn_implementation=ATTENTION_NAME, dtype=dtype)
        self.weight_bytes = _load(model, source, dtype)
        self._model = model.eval().to(self.device)
        self._body = model.base_model
        self._head = copy.copy(self._model)
        self._head._modules = self._model._modules | {model.base_model_prefix: HiddenIsOutput()}

    def kv_specs(self) -> list[KVSpec]:
        return list(self._specs)

    def embed(self, ids: torch.Tensor, side: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """As `Decoder.embed`; a multiplier that the architecture applies to embeddings inside touches side rows too."""
        table = self._model.get_input_embeddings()
        if side is None:
            return table(ids)  # type: ignore[no-any-return]
        rows, embeddings = side
        hidden: torch.Tensor = table(ids.index_fill(0, rows, 0))
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
    ) -> Any:
        """As `Decoder.forward`."""
        out = self._body(
            inputs_embeds=hidden[None],
            position_ids=batch.position[None],
            use_cache=False,
            output_hidden_states=bool(aux_hidden),
            motet_step=Step(batch, kvs, groups),
        )
        rows = out.last_hidden_state[0]
        if aux_hidden is None:
            return rows
        return rows, {layer: out.hidden_states[layer][0] for layer in aux_hidden}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, E] -> fp32 [n, V]."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _find(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model class and its config, or ModelLoadError naming what is not supported."""
    model_type = str(config.get("model_type"))[:60]
    if model_type not in CONFIG_MAPPING:
        raise ModelLoadError(f"model_type {model_type!r} is unknown to Motet and to transformers")
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(dict(copy.deepcopy(config)))
    except Exception as error:  # transformers raises many kinds for a config it cannot use
        raise ModelLoadError(f"{model_type}: unusable config: {type(error).__name__}: {str(error)[:200]}") from None
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(parsed, "is_encoder_decoder", False):
        raise ModelLoadError(f"{model_type} is not a causal language model")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    if not model_class._supports_attention_backend:
        raise ModelLoadError(f"{model_class.__name__} does not take attention from outside: it cannot use paged memory")
    return model_class, parsed


def _probe(skeleton: Any, config: Any) -> list[KVSpec]:
    """KV needs of each layer, seen by running the skeleton once; ModelLoadError where they are more than we serve."""
    name, probe = type(skeleton).__name__, Probe()
    hidden = torch.empty(1, 2, int(config.hidden_size), device="meta", dtype=next(skeleton.parameters()).dtype)
    position = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            skeleton.base_model(inputs_embeds=hidden, position_ids=position, use_cache=False, motet_step=probe)
    except Exception as error:  # whatever foreign code raises, the answer is the same: not this architecture
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelLoadError(f"{name} cannot run on the paged cache: {what}") from None
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    num_layers = int(config.num_hidden_layers)
    if kinds:
        probe.trouble = f"layers of type {', '.join(sorted(kinds))}"
    elif not probe.trouble and sorted(probe.specs) != list(range(num_layers)):
        probe.trouble = f"only {len(probe.specs)} of {num_layers} layers attend over the cache"
    if probe.trouble:
        raise ModelLoadError(f"{name} is not supported: {probe.trouble}")
    specs = [probe.specs[layer] for layer in range(num_layers)]
    named = getattr(config, "layer_types", None)
    if named is None and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        named = ["sliding_attention"] * num_layers
    if named and any(kind == "sliding_attention" and not spec.window for kind, spec in zip(named, specs, strict=False)):
        raise ModelLoadError(f"{name} is not supported: it keeps its sliding window to itself")
    return specs


def _load(model: Any, source: WeightSource, dtype: torch.dtype) -> int:
    """Put the source's tensors into the model; the bytes they take. Tied parameters are read once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    check_names(set(state) - tied - buffers, source.names(), optional=tied | buffers)
    num_bytes = 0
    parameters = dict(model.named_parameters())
    for name in sorted(source.names() - tied):
        value = source.get(name)
        value = dequantize(value, dtype) if isinstance(value, LinearWeight) else value
        target = parameters.get(name, state.get(name))
        assert target is not None
        if value.shape != target.shape:
            raise ModelLoadError(f"{name}: expected shape {list(target.shape)}, got {list(value.shape)}")
        if name in parameters:
            parameters[name].requires_grad_(False)
            parameters[name].data = value.to(dtype)
            num_bytes += value.numel() * dtype.itemsize
    model.tie_weights()
    return num_bytes

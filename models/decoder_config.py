"""What a decoder looks like: one frozen config for every family, read from a `transformers`-style config dict.

Knows the families' defaults and their switches. Knows no weights and never imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.errors import ModelLoadError

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu"]
BlockKind = Literal["sequential", "sandwich", "parallel"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One rotary table. `parameters` is the standardized dict: rope_type, rope_theta and what the type needs."""

    parameters: Mapping[str, Any]
    theta: float
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A causal decoder. Tuples per layer have `num_layers` entries.

    windows        visible tokens per layer, the row itself included; 0 = all
    rope_index     per layer, which of `ropes` rotates it; -1 = none (NoPE)
    qk_norm        norm over each head of q and k before rotary
    norm_offset    added to RMSNorm weights (Gemma stores w - 1)
    scale          of attention scores
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    ropes: tuple[RopeSpec, ...]
    rope_index: tuple[int, ...]
    windows: tuple[int, ...]
    scale: float
    block: BlockKind = "sequential"
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: NormKind | None = None
    packed: bool = False  # the checkpoint holds qkv_proj and gate_up_proj already fused
    attn_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    renormalize_experts: bool = True

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json dict; an unknown `model_type` or an unusable value raises ModelLoadError."""
        model_type = config.get("model_type")
        if model_type not in FAMILIES:
            raise ModelLoadError(f"expected model_type to be one of {sorted(FAMILIES)}, got {model_type!r}")
        if config.get("use_bidirectional_attention"):
            raise ModelLoadError("use_bidirectional_attention: only causal decoders are supported")
        try:
            return FAMILIES[model_type](config)
        except KeyError as error:
            raise ModelLoadError(f"{model_type} config lacks {error.args[0]!r}") from None


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """`config[key]`, where None counts as absent."""
    value = config.get(key)
    return default if value is None else value


def _rope(config: Mapping[str, Any], theta: float, *, layer_type: str | None = None, scaled: bool = True) -> RopeSpec:
    """One rotary table from either spelling: `rope_parameters` (perhaps by layer type) or the older two fields."""
    parameters = _get(config, "rope_parameters", {})
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    elif not parameters and scaled:
        parameters = _get(config, "rope_scaling", {})
    parameters = dict(parameters)
    rope_type = parameters.pop("type", None)
    parameters.setdefault("rope_type", rope_type or "default")
    theta = float(_get(parameters, "rope_theta", theta))
    parameters["rope_theta"] = theta
    if parameters["rope_type"] in ("su", "yarn") and config["model_type"] == "phi3":
        parameters["rope_type"] = "longrope"
    if parameters["rope_type"] in ("llama3", "yarn", "longrope", "dynamic"):
        original = config.get("original_max_position_embeddings")
        if original is not None and parameters["rope_type"] != "dynamic":
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    partial = _get(parameters, "partial_rotary_factor", _get(config, "partial_rotary_factor", 1.0))
    parameters["partial_rotary_factor"] = float(partial)
    return RopeSpec(parameters=parameters, theta=theta, partial_rotary_factor=float(partial))


def _shape(
    config: Mapping[str, Any], *, theta: float = 10_000.0, head_dim: int | None = None, tie: bool = False
) -> dict[str, Any]:
    """The fields that all families read alike: sizes, one rotary table, full attention everywhere."""
    num_heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    num_layers = int(config["num_hidden_layers"])
    dim = int(_get(config, "head_dim", head_dim or hidden // num_heads))
    num_kv_heads = int(_get(config, "num_key_value_heads", num_heads))
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ModelLoadError(
            f"expected num_attention_heads ({num_heads}) to be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return {
        "family": config["model_type"],
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(config["intermediate_size"]),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": dim,
        "max_position": int(_get(config, "max_position_embeddings", 2048)),
        "ropes": (_rope({"max_position_embeddings": 2048, **config}, float(_get(config, "rope_theta", theta))),),
        "rope_index": (0,) * num_layers,
        "windows": (0,) * num_layers,
        "scale": dim**-0.5,
        "norm_eps": float(_get(config, "rms_norm_eps", 1e-6)),
        "activation": _activation(_get(config, "hidden_act", "silu")),
        "tie_embeddings": bool(_get(config, "tie_word_embeddings", tie)),
    }


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"expected hidden_act to be one of {sorted(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], layer_types: list[str], default_window: int | None) -> tuple[int, ...]:
    """Window per layer from names of layer types; a config without a window has full layers only."""
    window = config.get("sliding_window", default_window)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelLoadError(f"expected layer_types of full_attention or sliding_attention, got {sorted(unknown)}")
    if len(layer_types) < config["num_hidden_layers"]:
        raise ModelLoadError(f"layer_types names {len(layer_types)} layers of {config['num_hidden_layers']}")
    if window is None:
        return (0,) * int(config["num_hidden_layers"])
    return tuple(
        int(window) if kind == "sliding_attention" else 0 for kind in layer_types[: config["num_hidden_layers"]]
    )


def _llama(config: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(_get(config, "attention_bias", False))
    return DecoderConfig(**_shape(config), qkv_bias=bias, out_bias=bias, mlp_bias=bool(_get(config, "mlp_bias", False)))


def _mistral(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _shape(config)
    shape["windows"] = (int(config.get("sliding_window", 4096) or 0),) * shape["num_layers"]
    return DecoderConfig(**shape)


def _qwen_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = int(config["num_hidden_layers"])
    if not _get(config, "use_sliding_window", False):
        return (0,) * num_layers
    first = int(_get(config, "max_window_layers", 28))
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return _windows(config, _get(config, "layer_types", default), 4096)


def _qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(**_shape(config) | {"windows": _qwen_windows(config)}, qkv_bias=True)


def _qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(_get(config, "attention_bias", False))
    shape = _shape(config, head_dim=128) | {"windows": _qwen_windows(config)}
    return DecoderConfig(**shape, qkv_bias=bias, out_bias=bias, qk_norm="rms")


def _smollm3(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _shape(config, theta=2_000_000.0, tie=True)
    num_layers = shape["num_layers"]
    every = int(_get(config, "no_rope_layer_interval", 4))
    rotated = _get(config, "no_rope_layers", [int((i + 1) % every != 0) for i in range(num_layers)])
    shape["rope_index"] = tuple(0 if flag else -1 for flag in rotated[:num_layers])
    if _get(config, "use_sliding_window", False):
        default = ["full_attention" if flag else "sliding_attention" for flag in rotated]
        shape["windows"] = _windows(config, _get(config, "layer_types", default), None)
    bias = bool(_get(config, "attention_bias", False))
    return DecoderConfig(**shape, qkv_bias=bias, out_bias=bias, mlp_bias=bool(_get(config, "mlp_bias", False)))


def _gemma_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma writes several names for one activation, the tanh GELU, and scales embeddings by sqrt(hidden)."""
    shape = _shape({**config, "hidden_act": "gelu_pytorch_tanh"}, head_dim=256, tie=True)
    bias = bool(_get(config, "attention_bias", False))
    return shape | {"norm_offset": 1.0, "embed_scale": shape["hidden_size"] ** 0.5, "qkv_bias": bias, "out_bias": bias}


def _gemma(config: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(**_gemma_shape(config))


def _gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _gemma_shape(config)
    default = ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape["num_layers"])]
    shape["windows"] = _windows(config, _get(config, "layer_types", default), 4096)
    shape["scale"] = float(_get(config, "query_pre_attn_scalar", 256)) ** -0.5
    return DecoderConfig(
        **shape,
        block="sandwich",
        attn_soft_cap=float(config.get("attn_logit_softcapping", 50.0) or 0.0),
        logit_soft_cap=float(config.get("final_logit_softcapping", 30.0) or 0.0),
    )


def _gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _gemma_shape(config)
    every = int(_get(config, "sliding_window_pattern", 6))
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(shape["num_layers"])]
    shape["windows"] = _windows(config, _get(config, "layer_types", default), 4096)
    shape["scale"] = float(_get(config, "query_pre_attn_scalar", 256)) ** -0.5
    shape["ropes"] = (
        _rope(config, float(_get(config, "rope_theta", 1_000_000.0)), layer_type="full_attention"),
        _rope(
            config, float(_get(config, "rope_local_base_freq", 10_000.0)), layer_type="sliding_attention", scaled=False
        ),
    )
    shape["rope_index"] = tuple(1 if window else 0 for window in shape["windows"])
    return DecoderConfig(
        **shape,
        block="sandwich",
        qk_norm="rms",
        attn_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
    )


def _phi(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _shape({**config, "partial_rotary_factor": _get(config, "partial_rotary_factor", 0.5)})
    shape["norm_eps"] = float(_get(config, "layer_norm_eps", 1e-5))
    shape["activation"] = _activation(_get(config, "hidden_act", "gelu_new"))
    return DecoderConfig(
        **shape,
        block="parallel",
        norm="layer",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm="layer" if _get(config, "qk_layernorm", False) else None,
    )


def _phi3(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _shape({**config, "rms_norm_eps": _get(config, "rms_norm_eps", 1e-5)})
    shape["windows"] = (int(_get(config, "sliding_window", 0)),) * shape["num_layers"]
    return DecoderConfig(**shape, packed=True)


def _mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    shape = _shape({**config, "rms_norm_eps": _get(config, "rms_norm_eps", 1e-5)}, theta=1_000_000.0)
    shape["windows"] = (int(_get(config, "sliding_window", 0)),) * shape["num_layers"]
    return DecoderConfig(
        **shape,
        num_experts=int(_get(config, "num_local_experts", 8)),
        experts_per_token=int(_get(config, "num_experts_per_tok", 2)),
    )


FAMILIES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "mixtral": _mixtral,
}

"""What GGUF calls things, in Hugging Face words: a table of families, their configs and their parameter names.

A family is one value of `general.architecture`. Llama's files keep q and k rows in another rotary order (`permuted`),
Gemma's keep norms with 1 added (`norm_plus_one`); models/gguf_source.py undoes both. Knows no bytes, imports no torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..engine.errors import ModelLoadError
from .gguf import GGUFFile

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}  # of a Mixtral checkpoint
# Tables that belong to the rotary config, not to a layer.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of GGUF: the classes of `transformers` it stands for and where its names differ."""

    model_type: str
    architecture: str
    permuted: bool = False
    norm_plus_one: bool = False
    names: dict[str, str] = field(default_factory=dict)
    activation: str = "silu"


FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", architecture="LlamaForCausalLM", permuted=True),
    "mistral": Family(model_type="mistral", architecture="MistralForCausalLM", permuted=True),
    "qwen2": Family(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": Family(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "gemma": Family(
        model_type="gemma", architecture="GemmaForCausalLM", norm_plus_one=True, activation="gelu_pytorch_tanh"
    ),
    "gemma2": Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        norm_plus_one=True,
        names=_SANDWICH,
        activation="gelu_pytorch_tanh",
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        norm_plus_one=True,
        names=_SANDWICH,
        activation="gelu_pytorch_tanh",
    ),
    "phi3": Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
}


def family_of(file: GGUFFile) -> Family:
    """The file's row of the table, or ModelLoadError with the list of those there are."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelLoadError(
            f"{file.path.name}: architecture {str(name)[:60]!r} is not supported; "
            f"expected one of {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    if family.model_type == "llama" and file.metadata.get("llama.expert_count", 0):
        return Family(model_type="mixtral", architecture="MixtralForCausalLM", permuted=True)
    return family


# ---------------------------------------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class Origin:
    """Where a Hugging Face parameter lies: a GGUF tensor, or one expert's part of it."""

    tensor: str
    expert: int | None = None


def hf_names(file: GGUFFile, family: Family) -> dict[str, Origin]:
    """Hugging Face parameter name -> its origin, for every tensor of the file. Unknown tensors are an error, listed."""
    out: dict[str, Origin] = {}
    unknown: list[str] = []
    for tensor in file.tensors:
        if tensor in ROPE_TENSORS:
            continue
        found = _translate(tensor, file, family)
        unknown += [] if found else [tensor[:80]]
        for name, origin in found:
            if name in out:
                raise ModelLoadError(f"{file.path.name}: {tensor[:80]!r} and {out[name].tensor[:80]!r} are both {name}")
            out[name] = origin
    if unknown:
        raise ModelLoadError(
            f"{file.path.name}: {len(unknown)} tensors that no {family.model_type} model has: {', '.join(unknown[:20])}"
        )
    return out


def _translate(tensor: str, file: GGUFFile, family: Family) -> list[tuple[str, Origin]]:
    stem, _, kind = tensor.rpartition(".")
    if kind not in ("weight", "bias"):
        return []
    if stem in _TOP_NAMES:
        return [(f"{_TOP_NAMES[stem]}.{kind}", Origin(tensor))]
    match = re.fullmatch(r"blk\.(\d{1,5})\.([a-z_]+)(?:\.(\d{1,5}))?", stem)
    if not match:
        return []
    layer, word, expert = f"model.layers.{int(match[1])}", match[2], match[3]
    if family.model_type == "mixtral" and word.startswith("ffn_") and kind == "weight" and word != "ffn_norm":
        return _translate_expert(tensor, file, layer, word, expert)
    name = family.names.get(word) or _BLOCK_NAMES.get(word)
    return [(f"{layer}.{name}.{kind}", Origin(tensor))] if name and expert is None else []


def _translate_expert(
    tensor: str, file: GGUFFile, layer: str, word: str, expert: str | None
) -> list[tuple[str, Origin]]:
    """Experts come stacked (`ffn_up_exps`, [E, F, H]) or, in old files, one by one (`ffn_up.3`)."""
    moe = f"{layer}.block_sparse_moe"
    if word == "ffn_gate_inp" and expert is None:
        return [(f"{moe}.gate.weight", Origin(tensor))]
    part = _EXPERTS.get(word.removeprefix("ffn_").removesuffix("_exps"))
    shape = file.tensors[tensor].shape
    if part and word.endswith("_exps") and expert is None and len(shape) == 3:
        return [(f"{moe}.experts.{e}.{part}.weight", Origin(tensor, e)) for e in range(shape[0])]
    if part and expert is not None and len(shape) == 2:
        return [(f"{moe}.experts.{int(expert)}.{part}.weight", Origin(tensor))]
    return []


# --------------------------------------------------------------------------------------------------------------- config


class _Fields:
    """Typed reads of `{architecture}.*` metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata["general.architecture"])

    def _get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def _bad(self, key: str, value: object) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path.name}: {self.prefix}.{key} is {str(value)[:60]!r}, expected a number > 0"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # some writers give one number a layer
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self._bad(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._bad(key, value)
        return float(str(np.float32(value)))  # the shortest decimal: 1e-05, not 9.99999974e-06

    def has(self, key: str) -> bool:
        return self._get(key) is not None

    def text(self, key: str) -> str:
        value = self._get(key)
        return value if isinstance(value, str) else ""


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that a `transformers` model of this file would have."""
    family = family_of(file)
    f = _Fields(file)
    hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    head_dim = f.integer(
        "attention.key_length",
        f.integer("rope.dimension_count", hidden // heads) if family.permuted else hidden // heads,
    )
    value_dim = f.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ModelLoadError(
            f"{file.path.name}: keys of {head_dim} and values of {value_dim} dimensions are not supported"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path.name}: no token_embd.weight")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": f.integer("feed_forward_length"),
        "num_hidden_layers": f.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": f.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": f.integer("context_length"),
        "rms_norm_eps": f.real("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(f, file, head_dim),
        ("hidden_activation" if family.model_type in ("gemma2", "gemma3_text") else "hidden_act"): family.activation,
    }
    if family.model_type in ("llama", "gemma", "gemma2", "gemma3_text", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    _add_special_ids(config, file)
    if family.model_type in ("mistral", "mixtral"):
        has_window = f.has("attention.sliding_window")
        config["sliding_window"] = f.integer("attention.sliding_window") if has_window else None
    if family.model_type == "mixtral":
        config["num_local_experts"] = f.integer("expert_count")
        config["num_experts_per_tok"] = f.integer("expert_used_count")
    if family.model_type == "phi3":
        _add_phi3(config, f)
    if family.model_type in ("gemma2", "gemma3_text"):
        _add_gemma(config, f)
    return config


def _add_special_ids(config: dict[str, Any], file: GGUFFile) -> None:
    vocab = config["vocab_size"]
    words = {"bos_token_id": ("bos",), "pad_token_id": ("padding",), "eos_token_id": ("eos", "eot", "eom")}
    for word, keys in words.items():
        values = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
        ids = list(dict.fromkeys(v for v in values if isinstance(v, int) and 0 <= v < vocab))
        config[word] = None if not ids else ids[0] if len(ids) == 1 else ids


def _add_phi3(config: dict[str, Any], f: _Fields) -> None:
    original = f.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    rope = config["rope_parameters"]
    rope["partial_rotary_factor"] = f.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if f.has("attention.sliding_window"):
        config["sliding_window"] = f.integer("attention.sliding_window")


def _add_gemma(config: dict[str, Any], f: _Fields) -> None:
    layers = config["num_hidden_layers"]
    config["sliding_window"] = f.integer("attention.sliding_window", 4096)
    # The largest of each scales attention by width over heads; the file does not say so, hence by depth.
    widest = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if layers == widest else config["head_dim"]
    for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        config[key] = f.real(key, default) if config["model_type"] == "gemma2" or f.has(key) else None
    pattern = 2 if config["model_type"] == "gemma2" else f.integer("attention.sliding_window_pattern", 6)
    config["layer_types"] = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if config["model_type"] == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": f.real("rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {"sliding_attention": local, "full_attention": config["rope_parameters"]}


def _rope(f: _Fields, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    theta = f.real("rope.freq_base", 1_000_000.0 if f.prefix == "gemma3" else 10_000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    kind = f.text("rope.scaling.type")
    if "rope_factors_long.weight" in file.tensors:
        short, long = (_table(file, f"rope_factors_{word}.weight") for word in ("short", "long"))
        original = f.integer("rope.scaling.original_context_length")
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        if f.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = f.real("rope.scaling.attn_factor")
    elif "rope_freqs.weight" in file.tensors:
        rope |= _llama3_or_longrope(_table(file, "rope_freqs.weight"), theta, head_dim, f)
    elif kind == "linear" or (not kind and f.has("rope.scale_linear")):
        factor = f.real("rope.scaling.factor" if kind else "rope.scale_linear")
        rope |= {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": f.real("rope.scaling.factor"),
            "original_max_position_embeddings": f.integer("rope.scaling.original_context_length"),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f.has(f"rope.scaling.{key}"):
                rope[name] = f.real(f"rope.scaling.{key}")
    elif kind not in ("", "none"):
        raise ModelLoadError(
            f"{file.path.name}: rope scaling {kind[:40]!r} is not supported here; "
            "expected none, linear, yarn, or a table of factors"
        )
    return rope


def _table(file: GGUFFile, name: str) -> list[float]:
    if name not in file.tensors or file.tensors[name].type.name != "F32" or len(file.tensors[name].shape) != 1:
        raise ModelLoadError(f"{file.path.name}: expected a row of F32 factors in {name}")
    return [float(x) for x in file.array(name)]


def _llama3_or_longrope(factors: list[float], theta: float, head_dim: int, f: _Fields) -> dict[str, Any]:
    """Llama 3.1's scaling is stored as its result, one divisor a frequency. Its usual constants are tried; where they
    do not give the table, the table itself is the config ("longrope" with equal factors says exactly that)."""
    original = f.integer("rope.scaling.original_context_length", 8192)
    guess = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / max(factors) + smooth)
    if len(factors) == len(expected) and np.allclose(expected, factors, rtol=1e-4):
        return guess
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": f.integer("context_length"),
    }

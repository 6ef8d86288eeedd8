"""Writes a tiny transformers model as GGUF the way llama.cpp's converter does, for tests of the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
SANDWICH = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_model(model_type: str, **changes: Any) -> transformers.PreTrainedModel:
    """A random fp32 model of a family, hidden 64, 2 layers, heads 4 over 2."""
    config = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
    } | changes
    if model_type == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if model_type in ("gemma2", "gemma3_text"):
        config |= {"query_pre_attn_scalar": 16}  # a file does not hold it; readers take head_dim
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    with torch.no_grad():  # norms and biases that say something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.1, 0.2)
    return model.float().eval()


def permute(weight: Tensor, heads: int) -> Tensor:
    """Llama's rotary order of rows: halves interleaved."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def checkpoint(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Parameters under their checkpoint names (Mixtral's experts apart), without a tied head."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if model.config.model_type == "mixtral" and ".mlp." in name:
            moe = name.partition(".mlp.")[0] + ".block_sparse_moe"
            if name.endswith("mlp.gate.weight"):
                out[f"{moe}.gate.weight"] = value
            for e in range(value.shape[0] if value.dim() == 3 else 0):
                if name.endswith("gate_up_proj"):
                    out[f"{moe}.experts.{e}.w1.weight"], out[f"{moe}.experts.{e}.w3.weight"] = value[e].chunk(2)
                else:
                    out[f"{moe}.experts.{e}.w2.weight"] = value[e]
        else:
            out[name] = value
    return out


def _tensors(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    names = SANDWICH if arch in ("gemma2", "gemma3") else NAMES
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            value = permute(value, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
        if arch.startswith("gemma") and stem.endswith("norm"):
            value = value + 1
        if stem in top:
            out[f"{top[stem]}.{kind}"] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            out |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif rest == "mlp.experts.down_proj":
            out[f"blk.{layer}.ffn_down_exps.weight"] = value
        else:
            out[f"blk.{layer}.{names[rest.rpartition('.')[0]]}.{kind}"] = value
    return out


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: str = "F32",
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    **metadata: Any,
) -> Path:
    """`kind` is the type of matrices whose rows it divides; everything else is F32. `extra` tensors are added."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[config.model_type])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for key, value in metadata.items():
        key = f"{ARCHITECTURES[config.model_type]}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, value in _tensors(model).items():
        array = np.ascontiguousarray(value.numpy())
        if kind != "F32" and array.ndim >= 2 and array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0:
            writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(name, array)
    for name, extra_array in (extra or {}).items():
        writer.add_tensor(name, extra_array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

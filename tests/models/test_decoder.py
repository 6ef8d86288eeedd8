"""Our decoder against `transformers`, family by family, on tiny random models through the paged cache.

For each family: fp32 logits, bf16 error against transformers' own, chunked == whole, decode, and batched == alone.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.models.build import build_model, random_model
from motet.models.decoder import Decoder
from motet.models.decoder_config import FAMILIES, DecoderConfig
from motet.models.loader import open_weights, read_config
from motet.models.parameters import TensorSource

from .paged import PagedSequences

VOCAB = 67
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [2.0, 3.0, 5.0],
    "partial_rotary_factor": 0.75,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3_rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1},
    "llama_yarn": {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral_window": {"model_type": "mistral", "sliding_window": 5},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "gemma": {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    },
    "phi": {"model_type": "phi", "num_key_value_heads": 4},
    "phi_qk_norm": {"model_type": "phi", "qk_layernorm": True, "partial_rotary_factor": 0.75},
    "phi3": {"model_type": "phi3", "sliding_window": 9},
    "phi3_longrope": {"model_type": "phi3", "original_max_position_embeddings": 32, "rope_parameters": LONG_ROPE},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


@functools.cache
def peer(case: str) -> Any:
    """The model of `transformers` with random weights; norms and biases are moved off their neutral start."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = copy.deepcopy(TINY | CASES[case])  # transformers standardizes nested dicts in place
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(len(case))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed_tokens" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model


@functools.cache
def saved(case: str, folder: Path) -> Path:
    peer(case).save_pretrained(folder / case)
    return folder / case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def ours(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    path = saved(case, folder)
    model = build_model(read_config(path), open_weights(path), dtype=dtype)
    assert isinstance(model, Decoder)
    return model


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def peer_logits(case: str, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return peer(case)(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, folder: Path) -> None:
    ids = random_ids(29)
    model = ours(case, folder)
    logits = PagedSequences(model.kv_specs(), 1, 29).run(model, [(0, ids)])[0]
    torch.testing.assert_close(logits, peer_logits(case, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_bf16_error_is_that_of_transformers(case: str, folder: Path) -> None:
    ids = random_ids(29)
    whole = peer_logits(case, ids)
    low = copy.deepcopy(peer(case)).to(torch.bfloat16)
    with torch.inference_mode():
        their_error = (low(torch.tensor([ids])).logits[0].float() - whole).abs().max()
    model = ours(case, folder, torch.bfloat16)
    logits = PagedSequences(model.kv_specs(), 1, 29, dtype=torch.bfloat16).run(model, [(0, ids)])[0]
    assert logits.dtype == torch.float32
    assert (logits - whole).abs().max() <= 2 * their_error


@pytest.mark.parametrize("case", CASES)
def test_chunks_decode_and_batches_equal_whole(case: str, folder: Path) -> None:
    """Three sequences in mixed steps: chunks of prompts beside single tokens give each sequence's own logits."""
    model = ours(case, folder)
    texts = [random_ids(23, 1), random_ids(14, 2), random_ids(17, 3)]
    steps = [
        [(0, 7)],
        [(0, 1), (1, 9)],
        [(2, 5), (0, 11), (1, 1)],
        [(0, 1), (1, 1), (2, 1)],
        [(1, 1), (2, 8)],
        [(2, 1), (0, 1)],
        [(1, 2), (0, 2), (2, 2)],
    ]
    sequences = PagedSequences(model.kv_specs(), 3, 23, seed=5)
    got: list[list[torch.Tensor]] = [[], [], []]
    for step in steps:
        chunks = [(i, texts[i][sequences.num_computed[i] : sequences.num_computed[i] + n]) for i, n in step]
        for (i, _), logits in zip(step, sequences.run(model, chunks), strict=True):
            got[i].append(logits)
    for text, parts in zip(texts, got, strict=True):
        alone = PagedSequences(model.kv_specs(), 1, 23, seed=9).run(model, [(0, text)])[0]
        torch.testing.assert_close(torch.cat(parts), alone, atol=2e-5, rtol=1e-5)


def test_all_families_are_covered() -> None:
    assert {settings["model_type"] for settings in CASES.values()} == set(FAMILIES)


def test_old_spellings_of_rope_mean_the_same() -> None:
    """Hub configs from before transformers 5: rope_theta and rope_scaling at the top, `type` for rope_type."""
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    new = DecoderConfig.from_dict(TINY | {"model_type": "llama", "rope_parameters": LLAMA3_ROPE})
    old = DecoderConfig.from_dict(TINY | {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": scaling})
    assert dict(old.ropes[0].parameters) == dict(new.ropes[0].parameters)
    gemma = TINY | {
        "model_type": "gemma3_text",
        "rope_theta": 7e5,
        "rope_local_base_freq": 1e3,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    full, local = DecoderConfig.from_dict(gemma).ropes
    assert (full.theta, full.parameters["rope_type"], full.parameters["factor"]) == (7e5, "linear", 8.0)
    assert (local.theta, local.parameters["rope_type"]) == (1e3, "default")
    assert DecoderConfig.from_dict(gemma).rope_index == (1, 0, 1)


def test_aux_hidden_is_the_stream_before_a_layer(folder: Path) -> None:
    ids = torch.tensor(random_ids(12))
    with torch.inference_mode():
        theirs = peer("llama")(ids[None], output_hidden_states=True).hidden_states
        model = ours("llama", folder)
        sequences = PagedSequences(model.kv_specs(), 1, 12)
        hidden, aux = model.forward(
            model.embed(ids), sequences.batch([(0, 12)]), sequences.kvs, sequences.groups, aux_hidden=(0, 2)
        )
    assert sorted(aux) == [0, 2]
    for layer, stream in aux.items():
        torch.testing.assert_close(stream, theirs[layer][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden, theirs[-1][0], atol=1e-4, rtol=1e-5)  # transformers lists the last one normed


def test_side_embeddings_replace_rows() -> None:
    model = random_model(TINY | CASES["gemma"])
    ids = torch.tensor(random_ids(6))
    plain = model.embed(ids)
    side = torch.randn(2, 32)
    ids[[1, 4]] = 10**6  # a replaced row's id is only counted
    mixed = model.embed(ids, side=(torch.tensor([1, 4]), side))
    assert torch.equal(mixed[[1, 4]], side)
    assert torch.equal(mixed[[0, 2, 3, 5]], plain[[0, 2, 3, 5]])


def test_missing_and_unexpected_weights_are_listed(folder: Path) -> None:
    tensors = dict(peer("llama").state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.7.surprise"] = torch.zeros(1)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight.*layers\.7\.surprise"):
        build_model(TINY | CASES["llama"], TensorSource(tensors))


def test_a_wrong_shape_is_named() -> None:
    tensors = dict(peer("llama").state_dict())
    tensors["model.norm.weight"] = torch.zeros(31)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*32.*31"):
        build_model(TINY | CASES["llama"], TensorSource(tensors))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_attention_heads": 5, "num_key_value_heads": 2},
        {"hidden_act": "relu6"},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"rope_parameters": ["default"]},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"num_hidden_layers": "many"},
    ],
)
def test_unusable_configs_are_load_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        build_model(TINY | CASES["llama"] | wrong, TensorSource({}))


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.02), ("int4", 0.25)])
def test_quantized_on_load_stays_close(quantize: Any, bound: float) -> None:
    settings = TINY | CASES["llama"] | {"hidden_size": 64, "intermediate_size": 96}
    whole, low = random_model(settings), random_model(settings, quantize=quantize)
    ids = random_ids(20)
    expected, got = (PagedSequences(m.kv_specs(), 1, 20).run(m, [(0, ids)])[0] for m in (whole, low))
    assert (got - expected).square().mean().sqrt() <= bound * expected.square().mean().sqrt()

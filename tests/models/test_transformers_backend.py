"""Families that Motet has no code for, run from `transformers` on our pages: equal to it, or refused by name."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.models.build import build_model
from motet.models.loader import open_weights, read_config
from motet.models.parameters import TensorSource
from motet.models.spec import Shard
from motet.models.transformers_backend import TransformersModel

from .paged import PagedSequences
from .test_decoder import TINY, random_ids

CASES: dict[str, dict[str, Any]] = {
    "olmo2": {"model_type": "olmo2"},
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": 5,
        "logit_scale": 0.25,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {
        "model_type": "granite",
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 6},
}


@functools.cache
def peer(case: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(**copy.deepcopy(TINY | CASES[case]))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@functools.cache
def ours(case: str) -> TransformersModel:
    model = build_model(TINY | CASES[case], TensorSource(peer(case).state_dict()))
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    ids = random_ids(29)
    with torch.inference_mode():
        expected = peer(case)(torch.tensor([ids])).logits[0]
    model = ours(case)
    logits = PagedSequences(model.kv_specs(), 1, 29).run(model, [(0, ids)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_batches_equal_whole(case: str) -> None:
    model = ours(case)
    texts = [random_ids(19, 1), random_ids(12, 2)]
    steps = [[(0, 9)], [(0, 1), (1, 8)], [(1, 1), (0, 7)], [(0, 1), (1, 1)], [(1, 2), (0, 1)]]
    sequences = PagedSequences(model.kv_specs(), 2, 19)
    got: list[list[torch.Tensor]] = [[], []]
    for step in steps:
        chunks = [(i, texts[i][sequences.num_computed[i] : sequences.num_computed[i] + n]) for i, n in step]
        for (i, _), logits in zip(step, sequences.run(model, chunks), strict=True):
            got[i].append(logits)
    for text, parts in zip(texts, got, strict=True):
        alone = PagedSequences(model.kv_specs(), 1, 19).run(model, [(0, text)])[0]
        torch.testing.assert_close(torch.cat(parts), alone, atol=2e-5, rtol=1e-5)


def test_window_layers_are_seen() -> None:
    assert [spec.window for spec in ours("cohere2").kv_specs()] == [5, 0, 5]
    assert [spec.window for spec in ours("starcoder2").kv_specs()] == [6, 6, 6]
    assert [spec.kind for spec in ours("olmo2").kv_specs()] == ["full"] * 3


def test_a_saved_model_loads_from_its_folder_in_bf16(tmp_path: Path) -> None:
    peer("granite").save_pretrained(tmp_path)
    model = build_model(read_config(tmp_path), open_weights(tmp_path), dtype=torch.bfloat16)
    ids = random_ids(15)
    with torch.inference_mode():
        expected = peer("granite")(torch.tensor([ids])).logits[0]
        low = copy.deepcopy(peer("granite")).to(torch.bfloat16)(torch.tensor([ids])).logits[0]
    logits = PagedSequences(model.kv_specs(), 1, 15, dtype=torch.bfloat16).run(model, [(0, ids)])[0]
    assert (logits - expected).abs().max() <= 2 * (low.float() - expected).abs().max()


def test_aux_hidden_and_side_embeddings() -> None:
    model, ids = ours("olmo2"), torch.tensor(random_ids(9))
    side = torch.randn(1, 32)
    with torch.inference_mode():
        hidden = model.embed(ids, side=(torch.tensor([3]), side))
        theirs = peer("olmo2")(inputs_embeds=hidden[None], output_hidden_states=True).hidden_states
        sequences = PagedSequences(model.kv_specs(), 1, 9)
        _, aux = model.forward(hidden, sequences.batch([(0, 9)]), sequences.kvs, sequences.groups, aux_hidden=(0, 2))
    assert torch.equal(hidden[3], side[0])
    for layer, stream in aux.items():
        torch.testing.assert_close(stream, theirs[layer][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "no_such_thing"}, "no_such_thing"),
        ({"model_type": "bert"}, "bert|Bert"),
        ({"model_type": "t5", "d_model": 32}, "t5"),
        ({"model_type": "bloom"}, "Bloom"),
        ({"model_type": "mamba2"}, "mamba2|Mamba2"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 3}, "DeepseekV3.*latent"),
        ({"model_type": "olmo2", "hidden_size": "wide"}, "olmo2.*config"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        build_model(TINY | settings, TensorSource({}))


def test_missing_and_unexpected_weights_are_listed() -> None:
    tensors = dict(peer("olmo2").state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.surprise"] = torch.zeros(1)
    with pytest.raises(ModelLoadError, match=r"(?s)layers\.1\.mlp\.up_proj\.weight.*model\.surprise"):
        build_model(TINY | CASES["olmo2"], TensorSource(tensors))


def test_sharding_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="olmo2.*shard"):
        build_model(TINY | CASES["olmo2"], TensorSource({}), shard=Shard(tp_size=2))

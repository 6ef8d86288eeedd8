"""Rotary: every scaling kind against transformers' own tables, and the rotation against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

from motet.kernels.rotary import Rotary, apply_rotary, inverse_frequencies, rotary_store_kv, rotate_reference

HALF = [1.0 + 0.1 * i for i in range(16)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn_deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn_fixed": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": HALF,
        "long_factor": [3 * x for x in HALF],
        "original_max_position_embeddings": 32,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "short_factor": HALF,
        "long_factor": [3 * x for x in HALF],
        "original_max_position_embeddings": 32,
        "factor": 7.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}
MAX_POSITION = 128


def llama_config(rope: dict[str, Any], theta: float = 10000.0) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": theta} | rope,
    )


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("seq_len", [None, 20, 500])
def test_frequencies_equal_transformers(name: str, theta: float, seq_len: int | None) -> None:
    rope = {"rope_theta": theta} | ROPES[name]
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama_config(rope), None, seq_len=seq_len)
    ours, our_factor = inverse_frequencies(rope, 32, MAX_POSITION, seq_len or 0)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", list(ROPES))
def test_tables_equal_transformers_fed_token_by_token(name: str) -> None:
    config = llama_config(ROPES[name])
    rotary = Rotary(32, ROPES[name], MAX_POSITION, 10000.0)
    theirs = LlamaRotaryEmbedding(config)
    x = torch.zeros(1)
    for position in (0, 1, 31, 32, 100, 127, 128, 150, 199):
        expected = theirs(x, torch.tensor([[position]]))
        for ours, whole in zip(rotary.cos_sin(torch.tensor([position])), expected, strict=True):
            torch.testing.assert_close(ours, whole[0, :, :16], atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [20, 300])
def test_context_length_fixes_the_frequencies(name: str, length: int) -> None:
    position = torch.arange(length)
    expected = LlamaRotaryEmbedding(llama_config(ROPES[name]))(torch.zeros(1), position[None])
    rotary = Rotary(32, ROPES[name], MAX_POSITION, 10000.0, context_length=length)
    for ours, whole in zip(rotary.cos_sin(position), expected, strict=True):
        torch.testing.assert_close(ours, whole[0, :, :16], atol=3e-5, rtol=0)


def test_older_words_and_defaults() -> None:
    old = Rotary(32, {"type": "linear", "factor": 4.0}, MAX_POSITION, 5000.0)
    new = Rotary(32, {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}, MAX_POSITION, 123.0)
    position = torch.tensor([77])
    assert torch.equal(old.cos_sin(position)[0], new.cos_sin(position)[0])
    outside = Rotary(
        32, {"type": "su"} | dict.fromkeys(("short_factor", "long_factor"), HALF), 64, original_max_position=32
    )
    assert outside.kind == "longrope" and Rotary(32).rotary_dim == 32
    assert (
        Rotary(32, {"partial_rotary_factor": 0.5}).rotary_dim
        == Rotary(32, None, partial_rotary_factor=0.5).rotary_dim
        == 16
    )
    with pytest.raises(ValueError, match="axial"):
        Rotary(32, {"rope_type": "axial"})


def test_table_does_not_depend_on_how_it_grew() -> None:
    at_once, slowly = Rotary(64, None, 8192), Rotary(64, None, 8192)
    for position in (10, 2047, 2048, 5000):
        slowly.cos_sin(torch.tensor([position]))
    everything = torch.arange(6000)
    for a, b in zip(at_once.cos_sin(everything), slowly.cos_sin(everything), strict=True):
        assert torch.equal(a, b)


def test_sections_equal_qwen_vl() -> None:
    position = torch.stack([torch.arange(9), torch.arange(9) * 3 % 7, torch.arange(9) * 5 % 11])
    banded = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLTextConfig(hidden_size=64, num_attention_heads=2, rope_parameters=dict(banded))
    expected = Qwen2_5_VLRotaryEmbedding(config)(torch.zeros(1), position[:, None])
    for ours, whole in zip(Rotary(32, banded).cos_sin(position), expected, strict=True):
        torch.testing.assert_close(ours, whole[0, :, :16])
    woven = banded | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config3 = Qwen3VLTextConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=dict(woven))
    expected = Qwen3VLTextRotaryEmbedding(config3)(torch.zeros(1), position[:, None])
    for ours, whole in zip(Rotary(32, woven).cos_sin(position), expected, strict=True):
        torch.testing.assert_close(ours, whole[0, :, :16])
    with pytest.raises(ValueError, match="mrope_section"):
        Rotary(32, banded | {"mrope_section": [4, 6, 7]})


def test_three_axes_without_sections_use_the_first() -> None:
    rotary = Rotary(32)
    position = torch.tensor([[3, 4], [9, 9], [8, 8]])
    assert torch.equal(rotary.cos_sin(position)[0], rotary.cos_sin(position[0])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (10, 6), (128, 128)])
def test_rotation(backend: str, dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int) -> None:
    fused = torch.randn(7, 8, dim).to(dtype)
    q, k = fused[:, :5], fused[:, 5:7]
    cos, sin = Rotary(rotary_dim).cos_sin(torch.tensor([0, 1, 2, 500, 9, 9, 3000]))
    expected = [rotate_reference(x, cos, sin, interleaved=interleaved) for x in (q, k)]
    for ours, theirs in zip(apply_rotary(q, k, cos, sin, interleaved=interleaved), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=2e-6 if dtype == torch.float32 else 1e-2, rtol=8e-3)
        assert torch.equal(ours[..., rotary_dim:], theirs[..., rotary_dim:])


def test_rotation_equals_transformers(backend: str) -> None:
    rotary, position = Rotary(32), torch.arange(5)
    q, k = torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    cos, sin = (torch.cat([x, x], -1) for x in rotary.cos_sin(position))
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    ours = apply_rotary(q.clone(), k.clone(), *rotary.cos_sin(position))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_store_kv(backend: str, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 9, 32).to(dtype)
    q, k, v = rows[:, :5].clone(), rows[:, 5:7], rows[:, 7:]
    cos, sin = Rotary(32).cos_sin(torch.arange(6) * 31)
    slots = torch.tensor([3, -1, 0, 11, -1, 6])
    expected_q, expected_k = rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
    kv = torch.zeros(4, 2, 2, 4, 32, dtype=dtype)
    ours = rotary_store_kv(q, k, v.clone(), cos, sin, kv, slots)
    torch.testing.assert_close(ours, expected_q)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(kv[slot // 4, 0, :, slot % 4], expected_k[row])
            assert torch.equal(kv[slot // 4, 1, :, slot % 4], v[row])
            kv[slot // 4, :, :, slot % 4] = 0
    assert torch.equal(kv, torch.zeros_like(kv))

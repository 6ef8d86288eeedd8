"""Libraries that take attention: chosen by name alone, called as documented (by stand-ins), left out where they must be."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from motet.kernels.attention import PagedBatch, paged_attention, paged_attention_reference
from motet.kernels.gpu import libraries


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    libraries.attention_library.cache_clear()
    yield
    libraries.attention_library.cache_clear()


def decode_batch(block: int) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Two sequences of 5 and 300 tokens, one row each, and one of nothing."""
    generator = torch.Generator().manual_seed(block)
    blocks = -(-300 // block)
    kv = torch.randn(1 + 2 * blocks, 2, 2, block, 32, generator=generator).bfloat16()
    table = torch.zeros(3, blocks, dtype=torch.int32)
    table[:2] = torch.arange(1, 1 + 2 * blocks).view(2, blocks)
    visible = torch.tensor([5, 300, 0])
    batch = PagedBatch(
        seq=torch.arange(3),
        position=visible - 1,
        slots=(),
        num_visible=visible,
        block_tables=(table,),
        kv_lens=visible,
        row_starts=torch.arange(4),
        mark="decode",
        max_kv_len=300,
        block_size=block,
    )
    return torch.randn(3, 6, 32, generator=generator).bfloat16(), kv, batch


def answer(
    q: torch.Tensor, kv: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a library computes, from what it was given: every row sees its first `lengths` kv indices."""
    _, _, batch = decode_batch(kv.shape[3])
    seen = replace(batch, num_visible=lengths, position=lengths - 1, block_tables=(table,))
    return paged_attention_reference(q, kv, seen, 0, **options)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    for module in (name.split(".")[0], name):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for key, value in functions.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    monkeypatch.setenv("MOTET_ATTENTION", name.split(".")[0])


def test_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def trtllm_batch_decode_with_kv_cache(
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        window_left: int = -1,
        sinks: list[torch.Tensor] | None = None,
        kv_layout: str = "HND",
    ) -> torch.Tensor:
        assert kv_layout == "HND" and seq_lens.dtype == block_tables.dtype == torch.int32 and max_seq_len == 300
        assert int(seq_lens.min()) >= 1 and not bool(workspace_buffer.any())
        calls.append(window_left)
        options = {"scale": bmm1_scale * bmm2_scale, "window": window_left + 1, "sinks": sinks[0] if sinks else None}
        return answer(query, kv_cache, seq_lens.long(), block_tables, **options)[0].to(query.dtype)

    monkeypatch.setattr(libraries, "WORKSPACE_BYTES", 1024)
    install(monkeypatch, "flashinfer.decode", trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache)
    q, kv, batch = decode_batch(16)
    for options in ({"scale": 0.2}, {"scale": 0.2, "window": 7, "sinks": torch.linspace(0, 1, 6)}):
        out = paged_attention(q, kv, batch, 0, **options)  # type: ignore[call-overload]
        expected, _ = paged_attention_reference(q, kv, batch, 0, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    assert calls == [-1, 6]
    libraries._workspace.cache_clear()
    # What it has no parameter for goes to Triton.
    paged_attention(q, kv, batch, 0, scale=0.2, soft_cap=3.0)
    paged_attention(q, kv, batch, 0, scale=0.2, return_lse=True)
    paged_attention(q, kv, replace(batch, mark="mixed"), 0, scale=0.2)
    paged_attention(q.float(), kv, batch, 0, scale=0.2)
    assert calls == [-1, 6]


def test_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        return_softmax_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert k_cache.shape[1] % 256 == 0 and k_cache.stride(-1) == 1 and causal and return_softmax_lse
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        calls.append(window_size)
        kv = torch.stack([k_cache, v_cache], 1).transpose(2, 3)
        options = {"scale": softmax_scale, "window": window_size[0] + 1, "soft_cap": softcap}
        out, lse = answer(q[:, 0], kv, cache_seqlens.long(), block_table, **options)
        return out[:, None].to(q.dtype), lse[:, :, None].float()

    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    q, kv, batch = decode_batch(256)
    out, lse = paged_attention(q, kv, batch, 0, scale=0.2, window=7, soft_cap=2.0, return_lse=True)
    expected, expected_lse = paged_attention_reference(q, kv, batch, 0, scale=0.2, window=7, soft_cap=2.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)
    paged_attention(q, kv, batch, 0, scale=0.2)
    assert calls == [(6, 0), (-1, -1)]
    paged_attention(q, kv, batch, 0, scale=0.2, sinks=torch.zeros(6))
    paged_attention(*decode_batch(16), 0, scale=0.2)
    assert len(calls) == 2


def test_xformers_takes_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 8)
    assert libraries.dense(q, k, v, scale=0.3) is None
    libraries.attention_library.cache_clear()

    def memory_efficient_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) * scale).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    install(monkeypatch, "xformers.ops", memory_efficient_attention=memory_efficient_attention)
    out = libraries.dense(q, k, v, scale=0.3)
    assert out is not None
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(a, b, c, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_a_name_must_be_known_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOTET_ATTENTION", raising=False)
    assert libraries.attention_library() == "triton"
    for name, error, match in (
        ("fast", ValueError, "expected triton"),
        ("flash_attn", RuntimeError, "cannot be imported"),
    ):
        libraries.attention_library.cache_clear()
        monkeypatch.setenv("MOTET_ATTENTION", name)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        with pytest.raises(error, match=match):
            libraries.attention_library()

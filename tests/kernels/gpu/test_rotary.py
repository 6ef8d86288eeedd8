"""Rotary embedding in Triton, in place and fused with the store, against the definition."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.attention import store_kv
from motet.kernels.rotary import Rotary, apply_rotary, rotary_store_kv, rotate_reference

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (10, 6)])
def test_rotation(dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int) -> None:
    fused = torch.randn(4, 8, dim).to(dtype)
    q, k = fused[:, :5], fused[:, 5:7]
    cos, sin = Rotary(rotary_dim).cos_sin(torch.tensor([0, 1, 500, 3000]))
    expected = [rotate_reference(x, cos, sin, interleaved=interleaved) for x in (q, k)]
    for ours, theirs in zip(apply_rotary(q, k, cos, sin, interleaved=interleaved), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=2e-6 if dtype == torch.float32 else 1e-2, rtol=8e-3)
        assert torch.equal(ours[..., rotary_dim:], theirs[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(32, 32), (80, 20)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_store(dtype: torch.dtype, dim: int, rotary_dim: int, interleaved: bool) -> None:
    rows = torch.randn(5, 9, dim).to(dtype)
    rows[1, 5:] = torch.nan  # k and v of a padding row
    q, k, v = rows[:, :5].clone(), rows[:, 5:7], rows[:, 7:]
    cos, sin = Rotary(rotary_dim).cos_sin(torch.arange(5) * 31)
    slots = torch.tensor([3, -1, 0, 11, 6])
    expected_q, expected_k = (rotate_reference(x, cos, sin, interleaved=interleaved) for x in (q, k))
    kv = torch.zeros(4, 2, 2, 4, dim, dtype=dtype)
    ours = rotary_store_kv(q, k, v.clone(), cos, sin, kv, slots, interleaved=interleaved)
    torch.testing.assert_close(ours, expected_q)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(kv[slot // 4, 0, :, slot % 4], expected_k[row])
            assert torch.equal(kv[slot // 4, 1, :, slot % 4], v[row])
            kv[slot // 4, :, :, slot % 4] = 0
    assert torch.equal(kv, torch.zeros_like(kv))


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_fused_store_quantizes_like_the_store_alone(dtype: torch.dtype) -> None:
    rows = torch.randn(4, 9, 40).bfloat16()
    cos, sin = Rotary(24).cos_sin(torch.arange(4) * 31)
    slots = torch.tensor([3, -1, 0, 7])
    fused, apart = (torch.zeros(2, 2, 2, 4, 44, dtype=torch.int8) for _ in range(2))
    rotary_store_kv(rows[:, :5].clone(), rows[:, 5:7], rows[:, 7:], cos, sin, fused.view(dtype), slots)
    _, k = apply_rotary(rows[:, :5].clone(), rows[:, 5:7].float(), cos, sin)  # fused, k is rounded once
    store_kv(k, rows[:, 7:], apart.view(dtype), slots)
    assert torch.equal(fused, apart) and bool(fused.any())

"""Store and copy in Triton: plain and quantized caches, padding rows, overlapping moves."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.attention import copy_slots, quantize_rows, store_kv

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("heads", [(1, 64), (3, 80), (5, 33)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("block", [8, 128])
def test_store(heads: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], block: int) -> None:
    num_heads, dim = heads
    rows = torch.randn(5, 2 * num_heads + 1, dim).to(dtypes[0])
    k, v = rows[:, :num_heads], rows[:, num_heads + 1 :]
    rows[1] = torch.nan  # a padding row
    slots = torch.tensor([2 * block + 3, -1, 0, 3 * block - 1, block])
    kv = torch.zeros(3, 2, num_heads, block, dim, dtype=dtypes[1])
    store_kv(k, v, kv, slots)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(kv[slot // block, 0, :, slot % block], k[row])
            assert torch.equal(kv[slot // block, 1, :, slot % block], v[row])
            kv[slot // block, :, :, slot % block] = 0
    assert torch.equal(kv, torch.zeros_like(kv))


def test_store_casts_to_the_cache() -> None:
    k, v = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    kv = torch.zeros(1, 2, 2, 8, 16, dtype=torch.bfloat16)
    store_kv(k, v, kv, torch.arange(4))
    assert torch.equal(kv[0, 0, :, :4].transpose(0, 1), k.bfloat16())
    store_kv(k[:0], v[:0], kv, torch.arange(0))
    assert torch.equal(kv[0, 1, :, :4].transpose(0, 1), v.bfloat16())


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize(("dim", "width"), [(64, 68), (40, 64)])
def test_quantized_store(dtype: torch.dtype, dim: int, width: int) -> None:
    """Codes are the nearest ones under each token and head's own scale; the row's other bytes stay as they were."""
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn(2, 6, 3, dim, generator=generator) * torch.tensor([1e-4, 1.0, 300.0])[:, None]
    k[2, 1] = 0.0
    v[4, 2, 7] = torch.nan
    slots = torch.tensor([0, 9, 5, -1, 12, 15])
    codes = torch.full((2, 2, 3, 8, width), 77, dtype=torch.int8)
    kv = codes.view(dtype)
    store_kv(k, v, kv, slots)
    largest_code = 127.0 if dtype == torch.int8 else 448.0
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for which, x in enumerate((k[row], v[row])):
            there = codes[slot // 8, which, :, slot % 8]
            scale = there[:, -4:].contiguous().view(torch.float32)
            expected = x.abs().amax(-1, keepdim=True) / largest_code
            torch.testing.assert_close(scale, expected, equal_nan=True, rtol=1e-6, atol=0)
            if dtype == torch.int8:
                assert torch.equal(torch.cat([there[:, :dim], there[:, -4:]], 1), quantize_rows(x))
            back = kv[slot // 8, which, :, slot % 8, :dim].float() * scale
            step = scale * 0.51 if dtype == torch.int8 else torch.maximum(x.abs() / 15.9, scale * 2.0**-10)
            good = ~scale.isnan()[:, 0]
            assert bool(((back - x).abs()[good] <= step.expand_as(x)[good]).all())
            assert bool(back[~good].isnan().all())
            assert bool((there[:, dim:-4] == 77).all())
            codes[slot // 8, which, :, slot % 8] = 77
    assert bool((codes == 77).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
def test_copy_reads_everything_before_it_writes(dtype: torch.dtype) -> None:
    width = 36 if dtype in (torch.int8, FP8) else 18
    kvs = [
        torch.randint(-128, 128, (6, 2, 3, 8, width * dtype.itemsize), dtype=torch.int8).view(dtype) for _ in range(3)
    ]
    before = [kv.clone() for kv in kvs]
    src, dst = torch.tensor([9, 10, 11, 47, 0, -1]), torch.tensor([10, 11, 9, 0, 20, -1])
    copy_slots(kvs, src, dst, 8)
    for kv, old in zip(kvs, before, strict=True):
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            if a >= 0:
                old_bytes = old.view(torch.int8)[a // 8, :, :, a % 8]
                assert torch.equal(kv.view(torch.int8)[b // 8, :, :, b % 8], old_bytes)
        untouched = [slot for slot in range(48) if slot not in dst.tolist()]
        for slot in untouched:
            here, there = (x.view(torch.int8)[slot // 8, :, :, slot % 8] for x in (kv, old))
            assert torch.equal(here, there)


def test_copy_of_nothing() -> None:
    kv = torch.zeros(2, 2, 1, 4, 8)
    copy_slots([kv], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 4)
    copy_slots([], torch.tensor([1]), torch.tensor([2]), 4)
    assert torch.equal(kv, torch.zeros_like(kv))

"""Quantized matrices on CUDA: the Triton kernel under its interpreter against fp32, layouts without loss, FP8 rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from motet.kernels import linear as door
from motet.kernels.gpu import linear as gpu
from motet.kernels.linear import LinearWeight

OUT, IN = 72, 160  # neither fills its last tile; five groups of 32: the last tile of 4 bits is half empty
CPU = torch.device("cpu")
FORMATS = ("q4_0", "q4_1", "q8_0", "int8", "int4")


def stored(format: str, out: int = OUT, width: int = IN, group: int = 32) -> LinearWeight:
    """A random weight in storage layout."""
    generator = torch.Generator().manual_seed(out + width)
    weight = torch.randn(out, width, generator=generator) * 0.1
    if format in ("int8", "int4", "fp8"):
        makers = {"int8": door.quantize_int8, "fp8": door.quantize_fp8}
        return makers[format](weight) if format in makers else door.quantize_int4(weight, group)
    blocks = torch.randint(0, 256, (out, width // 32, door.BLOCK_BYTES[format]), dtype=torch.uint8, generator=generator)
    for at in range(0, 4 if format == "q4_1" else 2, 2):
        halves = (torch.rand(out, width // 32, 1, generator=generator) * 0.05 - 0.01 * at).half()
        blocks[..., at : at + 2] = halves.view(torch.uint8)
    return door.from_blocks(format, blocks)  # type: ignore[arg-type]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_layout_keeps_every_value(format: str, dtype: torch.dtype) -> None:
    weight = stored(format)
    prepared = gpu.prepare(weight, dtype, CPU)
    assert prepared is not None
    exact = door.dequantize(weight, torch.float32)
    assert torch.equal(door.dequantize(prepared, torch.float32), exact)
    assert torch.equal(gpu.unpack(prepared, torch.float32), exact)
    assert torch.equal(gpu.unpack(prepared, dtype), exact.to(dtype))
    ids = torch.tensor([71, 0, 5, 5])
    assert torch.equal(door.embedding(ids, prepared, torch.float32), exact[ids])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "splits"), [(1, 0), (3, 2), (33, 1), (70, 0)])
def test_error_is_at_most_twice_that_of_a_plain_bf16_matrix(format: str, rows: int, splits: int) -> None:
    weight = stored(format)
    prepared = gpu.prepare(weight, torch.bfloat16, CPU)
    assert prepared is not None
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, IN, generator=generator).bfloat16()
    bias = torch.randn(OUT, generator=generator).bfloat16()
    exact = door.dequantize(weight, torch.float32)
    expected = F.linear(x.float(), exact, bias.float())
    plain = error(F.linear(x, exact.bfloat16(), bias), expected)
    assert error(gpu.quantized_matmul(x, prepared, bias, splits=splits), expected) <= 2 * plain


def test_groups_of_64_and_fp16_and_views() -> None:
    weight = stored("int4", width=192, group=64)
    prepared = gpu.prepare(weight, torch.float16, CPU)
    assert prepared is not None
    x = torch.randn(4, 400).half()[:, 100:292]  # a view: its rows lie 400 apart
    expected = x.float() @ door.dequantize(weight, torch.float32).T
    assert error(gpu.quantized_matmul(x, prepared), expected) < 1e-3


def test_parts_of_k_add_up_the_same_way_every_time_and_leave_no_count_behind() -> None:
    prepared = gpu.prepare(stored("q4_0", width=512), torch.bfloat16, CPU)
    assert prepared is not None
    x = torch.randn(5, 512).bfloat16()
    first = gpu.quantized_matmul(x, prepared, splits=4)
    assert torch.equal(gpu.quantized_matmul(x, prepared, splits=4), first)
    assert not gpu._arrivals(CPU).any()
    assert error(first, gpu.quantized_matmul(x, prepared, splits=1).float()) < 1e-2


def test_splits_fill_the_processors_and_leave_none_empty() -> None:
    assert gpu.num_splits(64, 64, 132) == 9  # 4096 x 4096 in 4 bits on 132 multiprocessors
    assert gpu.num_splits(2004, 64, 132) == 1  # a vocabulary fills them alone
    assert gpu.num_splits(1, 3, 132) == 1


def test_rows_do_not_leak_into_each_other_not_even_nan() -> None:
    prepared = gpu.prepare(stored("q4_1"), torch.bfloat16, CPU)
    assert prepared is not None
    x = torch.randn(5, IN).bfloat16()
    clean = gpu.quantized_matmul(x, prepared)
    x[2] = torch.nan
    poisoned = gpu.quantized_matmul(x, prepared)
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.equal(poisoned[keep], clean[keep]) and bool(poisoned[2].isnan().all())


@pytest.mark.parametrize("rows", [1, 20])
def test_fp8_multiplies_what_both_sides_were_rounded_to(rows: int) -> None:
    weight = stored("fp8", out=48, width=160)
    prepared = gpu.prepare(weight, torch.bfloat16, CPU)
    assert prepared is not None and prepared.layout == "fp8"
    x = torch.randn(rows, 160).bfloat16()
    bias = torch.randn(48).bfloat16()
    quantized, scale = gpu.quantize_rows(x)
    rounded = quantized.float() * scale
    assert float((rounded - x.float()).abs().max() / x.float().abs().max()) < 2**-4
    expected = F.linear(rounded, door.dequantize(weight, torch.float32), bias.float())
    assert error(door.linear(x, prepared, bias), expected) < 4e-3
    # Against the unrounded product: two roundings to a 3-bit mantissa.
    assert (
        error(door.linear(x, prepared, bias), F.linear(x.float(), door.dequantize(weight, torch.float32), bias.float()))
        < 0.06
    )


def test_fp8_rows_equal_torchs_cast_and_nan_stays() -> None:
    x = torch.randn(6, 300) * torch.logspace(-4, 4, 6)[:, None]
    x[0] = 0
    quantized, scale = gpu.quantize_rows(x.bfloat16())
    wide = x.bfloat16().float()
    expected = (wide.abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
    assert torch.allclose(scale, expected, rtol=1e-6, atol=0)
    assert torch.equal(quantized.float(), (wide / scale).clamp(-448, 448).to(gpu.FP8).float())
    x[3, 7] = torch.nan
    quantized, scale = gpu.quantize_rows(x.bfloat16())
    assert (quantized.float() * scale).isnan().any(1).tolist() == [False, False, False, True, False, False]


def test_the_door_prepares_and_multiplies_by_these() -> None:
    x = torch.randn(2, 3, IN).bfloat16()
    for format, layout in (("q4_0", "gpu4"), ("int8", "gpu8")):
        prepared = door.prepare(stored(format), torch.bfloat16, CPU)
        assert prepared.layout == layout
        expected = gpu.quantized_matmul(x.flatten(0, 1), prepared).view(2, 3, OUT)
        assert torch.equal(door.linear(x, prepared), expected)
        assert door.linear(x, prepared, out_dtype=torch.float32).dtype is torch.float32
    assert door.linear(x[:, :0].reshape(0, IN), prepared).shape == (0, OUT)


def test_many_rows_go_through_the_unpacked_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MANY_ROWS", 8)
    prepared = gpu.prepare(stored("q4_1"), torch.bfloat16, CPU)
    assert prepared is not None
    x = torch.randn(8, IN).bfloat16()
    assert torch.equal(gpu.linear(x, prepared, None), F.linear(x, door.dequantize(prepared, torch.bfloat16)))


def test_what_the_kernels_do_not_take_is_dequantized() -> None:
    assert gpu.prepare(stored("int4"), torch.float32, CPU) is None
    assert gpu.prepare(stored("fp8", width=40), torch.bfloat16, CPU) is None
    assert gpu.prepare(stored("fp8"), torch.float16, CPU) is None

"""kernels/linear.py: every format against plain fp32, in storage and prepared; slices; fused rows; C++ and torch."""

from __future__ import annotations

import pytest
import torch

from motet.kernels import dispatch
from motet.kernels import linear as door
from motet.kernels.linear import LinearWeight

BF16 = torch.bfloat16
FORMATS = ("fp32", "bf16", "fp16", "q4_0", "q4_1", "q8_0", "int8", "int4")
QUANTIZED = FORMATS[3:]


def make(format: str, out: int = 128, inputs: int = 96, seed: int = 0) -> LinearWeight:
    """A random weight in storage layout."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inputs, generator=g) * 0.05
    if format in door.FLOAT_DTYPES:
        return door.from_tensor(weight.to(door.FLOAT_DTYPES[format]))
    if format == "int8":
        return door.quantize_int8(weight)
    if format == "int4":
        return door.quantize_int4(weight)
    blocks = torch.randint(0, 256, (out, inputs // 32, door.BLOCK_BYTES[format]), generator=g, dtype=torch.uint8)
    num_halves = 2 if format == "q4_1" else 1
    halves = (torch.rand(out, inputs // 32, num_halves, generator=g) * 0.02).half()
    blocks[..., : 2 * num_halves] = halves.view(torch.uint8)
    return door.from_blocks(format, blocks)  # type: ignore[arg-type]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.fixture(params=["as built", "torch alone"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends: the one this machine has, and plain torch."""
    if request.param == "torch alone":
        monkeypatch.setattr(door, "_ops", lambda: None)
        monkeypatch.setattr(door, "has_bf16_products", lambda: False)
    return str(request.param)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernels round them: 8 bits, a scale for each 32 inputs of a row. fp32."""
    blocks = x.float().view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(2, keepdim=True)
    return ((blocks * (127 / largest.clamp_min(1e-30))).round() * (largest / 127)).view(x.shape)


def rounding_bound(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How far rounding may move each result [R, out]: half a step per activation, 2^-8 of the result for bf16, and a
    little of the sum of magnitudes for fp32 sums."""
    steps = x.float().view(x.shape[0], -1, 32).abs().amax(2).repeat_interleave(32, 1) / 127 * 0.5
    largest = x.float().abs() @ exact.abs().T
    return steps @ exact.abs().T * 1.001 + (x.float() @ exact.T).abs() / 256 + largest * 1e-5 + 1e-30


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 200])
def test_error_is_at_most_twice_that_of_plain_low_precision(ways: str, format: str, num_rows: int) -> None:
    """Plain low precision: bf16, and for quantized weights activations of 8 bits besides, both in torch."""
    storage = make(format)
    exact = door.dequantize(storage, torch.float32)
    x = torch.randn(num_rows, storage.in_features, generator=torch.Generator().manual_seed(1)).to(BF16)
    bias = torch.linspace(-1, 1, storage.out_features)
    truth = x.float() @ exact.T + bias
    prepared = door.prepare(storage, BF16)
    if prepared.is_quantized and prepared.layout == "rows16":
        plain = (rounded(x) @ exact.T + bias).to(BF16)
    else:
        plain = torch.nn.functional.linear(x, exact.to(BF16), bias.to(BF16))
    got = door.linear(x, prepared, bias.to(BF16))
    assert got.dtype == BF16 and got.shape == plain.shape
    assert relative_error(got, truth) <= 2 * relative_error(plain, truth)


@pytest.mark.parametrize("format", [*QUANTIZED, "bf16"])
@pytest.mark.parametrize(("out", "inputs"), [(48, 64), (33, 32), (7, 96), (100, 160)])
def test_every_number_of_rows(format: str, out: int, inputs: int) -> None:
    """Whole and cut tiles, rows that fill no register block: each result within what rounding explains, and equal to the
    one that the row gives alone; fp32 results are the same numbers, unrounded."""
    storage = make(format, out=out, inputs=inputs)
    exact, prepared = door.dequantize(storage, torch.float32), door.prepare(storage, BF16)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(2)).to(BF16)
    x = torch.randn(1000, inputs, generator=torch.Generator().manual_seed(1)).to(BF16)
    truth, bound = x.float() @ exact.T + bias, rounding_bound(x, exact) + bias.abs() / 256
    rounds_alone = prepared.layout == "rows16"  # torch's matmul promises nothing of the kind
    for rows in (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 100, 1000):
        got = door.linear(x[:rows], prepared, bias)
        assert bool(((got.float() - truth[:rows]).abs() <= bound[:rows]).all())
        wide = door.linear(x[:rows], prepared, bias, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        if rounds_alone and (format != "bf16" or rows < 100):
            assert torch.equal(wide.to(BF16), got)
            last = door.linear(x[rows - 1 : rows], prepared, bias)
            assert torch.equal(got[-1:], last)


def test_rows_of_zeros_of_huge_and_of_tiny_values() -> None:
    for format in QUANTIZED:
        storage = make(format)
        exact, prepared = door.dequantize(storage, torch.float32), door.prepare(storage, BF16)
        x = torch.randn(7, storage.in_features, generator=torch.Generator().manual_seed(1))
        x[0] = 0
        x[1, 32:64] = 0
        x[2], x[3], x[4, 5] = x[2] * 1e30, x[3] * 1e-30, 1e4
        x[5] *= 1e-38
        x[6, :32] = 1e35
        x = x.to(BF16)
        got = door.linear(x, prepared).float()
        assert bool(got.isfinite().all())
        assert bool((got[0] == 0).all())
        assert bool(((got - x.float() @ exact.T).abs() <= rounding_bound(x, exact) + 1e-33).all())


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_weights_and_activations_do_not_overflow(format: str, sign: int) -> None:
    """Sums of a block of the largest bytes, which AVX2 adds up in 16 bits where weights have four."""
    blocks = make(format, inputs=64).tensors["blocks"].clone()
    header = door.BLOCK_BYTES[format] - (32 if format == "q8_0" else 16)
    blocks[:64, :, header:] = 0x7F if format == "q8_0" else 0xFF
    blocks[64:, :, header:] = 0x80 if format == "q8_0" else 0x00
    storage = door.from_blocks(format, blocks)  # type: ignore[arg-type]
    x = torch.full((9, 64), 3.0 * sign).to(BF16)
    got = door.linear(x, door.prepare(storage, BF16), out_dtype=torch.float32)
    torch.testing.assert_close(got, x.float() @ door.dequantize(storage, torch.float32).T, rtol=1e-2, atol=1e-3)


def test_a_row_that_is_not_finite_shows_and_stays_alone() -> None:
    """Nothing may hide a NaN: the engine fails a request by it."""
    for format in [*QUANTIZED, "bf16"]:
        prepared = door.prepare(make(format), BF16)
        x = torch.randn(9, prepared.in_features, generator=torch.Generator().manual_seed(1)).to(BF16)
        clean = door.linear(x, prepared)
        for value in (float("nan"), float("inf"), -float("inf")):
            spoilt = x.clone()
            spoilt[4, 40] = value
            got = door.linear(spoilt, prepared)
            assert not bool(got[4].isfinite().any())
            keep = [0, 1, 2, 3, 5, 6, 7, 8]
            assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize("format", FORMATS)
def test_fp32_computes_with_the_exact_values(ways: str, format: str) -> None:
    storage = make(format)
    x = torch.randn(5, storage.in_features)
    got = door.linear(x, door.prepare(storage, torch.float32))
    torch.testing.assert_close(got, door.linear_reference(x, storage), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(door.linear(x, storage.__class__(**vars(storage))), got, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_prepared_weights_keep_their_values(ways: str, format: str) -> None:
    storage = make(format, out=64)
    exact = door.dequantize(storage, torch.float32)
    prepared = door.prepare(storage, BF16)
    if prepared.is_quantized:
        assert torch.equal(door.dequantize(prepared, torch.float32), exact)
        assert torch.equal(door.dequantize(prepared, BF16), exact.to(BF16))
    ids = torch.tensor([5, 0, 63, 5])
    assert torch.equal(door.embedding(ids, prepared, BF16), exact[ids].to(BF16))
    assert torch.equal(door.embedding(ids, storage, torch.float32), exact[ids])


@pytest.mark.parametrize("format", QUANTIZED)
def test_quantized_weights_stay_small(format: str) -> None:
    """Bits per weight with the C++ kernels: 4 or 8 and the scales."""
    if dispatch.cpu_ops() is None:
        assert door.prepare(make(format), BF16).num_bytes > 0
        return
    storage = make(format)
    bits = door.prepare(storage, BF16).num_bytes * 8 / (storage.out_features * storage.in_features)
    assert bits <= {"q4_0": 4.5, "q4_1": 5.0, "q8_0": 8.5, "int8": 8.5, "int4": 5.0}[format]


@pytest.mark.parametrize("format", [*QUANTIZED, "bf16"])
def test_a_row_does_not_depend_on_its_neighbours(format: str) -> None:
    prepared = door.prepare(make(format, out=200), BF16)
    if prepared.layout != "rows16":  # torch's matmul promises nothing of the kind
        return
    x = torch.randn(23, prepared.in_features).to(BF16)
    together = door.linear(x, prepared)
    for rows in (1, 2, 3, 5, 8, 12):
        assert torch.equal(torch.cat([door.linear(part, prepared) for part in x.split(rows)]), together)


@pytest.mark.parametrize("format", FORMATS)
def test_slices(format: str) -> None:
    storage = make(format)
    exact = door.dequantize(storage, torch.float32)
    rows, cols = door.slice_rows(storage, 32, 96), door.slice_cols(storage, 32, 96)
    assert torch.equal(door.dequantize(rows, torch.float32), exact[32:96])
    assert torch.equal(door.dequantize(cols, torch.float32), exact[:, 32:96])
    for part in (rows, cols):  # views must prepare as well as wholes
        x = torch.randn(2, part.in_features, generator=torch.Generator().manual_seed(1)).to(BF16)
        got = door.linear(x, door.prepare(part, BF16))
        assert bool(
            (
                (got - door.linear_reference(x.float(), part)).abs()
                <= rounding_bound(x, door.dequantize(part, torch.float32))
            ).all()
        )
    order = torch.tensor([3, 1, 127])
    assert torch.equal(door.dequantize(door.take_rows(storage, order), torch.float32), exact[order])


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0", "int4"])
def test_columns_must_follow_the_group(format: str) -> None:
    with pytest.raises(ValueError, match="multiples of the group 32"):
        door.slice_cols(make(format), 0, 40)
    with pytest.raises(ValueError, match="outside"):
        door.slice_rows(make(format), 0, 129)


@pytest.mark.parametrize("format", FORMATS)
def test_fused_rows(format: str) -> None:
    parts = [make(format, out=n, seed=n) for n in (64, 32, 32)]
    fused = door.concat_rows(parts)
    assert fused.format == format
    want = torch.cat([door.dequantize(p, torch.float32) for p in parts])
    assert torch.equal(door.dequantize(fused, torch.float32), want)


def test_fused_rows_of_different_formats_become_fp32() -> None:
    parts = [make("q4_0"), make("q8_0")]
    fused = door.concat_rows(parts)
    assert fused.format == "fp32" and fused.out_features == 256
    assert torch.equal(fused.tensors["weight"], torch.cat([door.dequantize(p, torch.float32) for p in parts]))
    with pytest.raises(ValueError, match="in_features differ"):
        door.concat_rows([make("q4_0"), make("q4_0", inputs=64)])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_and_int8_come_near_the_weight(group: int) -> None:
    weight = torch.randn(64, 256)
    int4, int8 = door.quantize_int4(weight.to(BF16), group), door.quantize_int8(weight.to(BF16))
    assert int4.group == group and int4.tensors["scale"].shape == (64, 256 // group)
    assert relative_error(door.dequantize(int4, torch.float32), weight) < 0.11
    assert relative_error(door.dequantize(int8, torch.float32), weight) < 0.01
    x = torch.randn(4, 256).to(BF16)
    for w in (int4, int8):
        got = door.linear(x, door.prepare(w, BF16))
        assert relative_error(got, door.linear_reference(x.float(), w)) < 0.01


def test_quantizing_odd_weights() -> None:
    """Zeros, constants, and values beyond fp16's range."""
    noise = torch.randn(16, 32)
    for weight in (torch.zeros(16, 32), torch.full((16, 32), 3.0), noise * 1e-7, noise * 1e6):
        for w in (door.quantize_int4(weight), door.quantize_int8(weight)):
            value = door.dequantize(w, torch.float32)
            assert bool(value.isfinite().all())
            assert float((value - weight).abs().max()) <= float(weight.abs().max()) / 6 + 1e-30
    with pytest.raises(ValueError, match="group must be 32, 64 or 128"):
        door.quantize_int4(torch.zeros(4, 96), 64)


def test_widths_that_fill_no_tile_or_block(ways: str) -> None:
    for out, inputs in ((17, 32), (1, 64), (33, 96)):
        storage = make("q4_0", out=out, inputs=inputs)
        x = torch.randn(2, inputs).to(BF16)
        got = door.linear(x, door.prepare(storage, BF16))
        torch.testing.assert_close(got, door.linear_reference(x, storage), rtol=2e-2, atol=2e-2)
    narrow = door.from_tensor(torch.randn(8, 20).to(BF16))  # no multiple of 32
    x = torch.randn(2, 20).to(BF16)
    got = door.linear(x, door.prepare(narrow, BF16))
    torch.testing.assert_close(got, door.linear_reference(x, narrow), rtol=2e-2, atol=2e-2)


def test_more_dimensions_and_no_rows(ways: str) -> None:
    prepared = door.prepare(make("q4_1"), BF16)
    x = torch.randn(2, 3, 96).to(BF16)
    assert torch.equal(door.linear(x, prepared), door.linear(x.view(6, 96), prepared).view(2, 3, -1))
    assert door.linear(x.view(6, 96)[:0], prepared).shape == (0, 128)


def test_embedding_refuses_ids_out_of_range(ways: str) -> None:
    for format in ("q8_0", "bf16"):
        prepared = door.prepare(make(format), BF16)
        with pytest.raises((IndexError, RuntimeError)):
            door.embedding(torch.tensor([128]), prepared, BF16)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avxvnni"])
def test_other_processors(isa: str) -> None:
    """The C++ fallbacks mean the same, in a child since the choice is made once."""
    import os
    import subprocess
    import sys

    code = """
import os
import torch
from motet.kernels import dispatch, linear as door
from test_linear import FORMATS, make, rounded
torch.set_num_threads(1)
if dispatch.cpu_ops() is not None:
    assert torch.ops.motet_cpu.bf16_instruction_set() in ("plain", os.environ["MOTET_CPU_ISA"].replace("vnni", "2"))
    chosen, isa = torch.ops.motet_cpu.int8_instruction_set(), os.environ["MOTET_CPU_ISA"]
    assert chosen == isa or torch.ops.motet_cpu.instruction_set() == "plain" or isa == "avxvnni"
    assert door.multiplies_bytes(door.prepare(make("q8_0"), torch.bfloat16)) == (
        chosen != "plain" and not torch.cpu._is_amx_tile_supported()
    )
    for format in FORMATS:
        w = make(format, out=40, inputs=64)
        x = torch.randn(63, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        x[7] = 0
        p = door.prepare(w, torch.bfloat16)
        kept = p.is_quantized or door.has_bf16_products()
        assert p.layout == ("rows16" if kept else "plain")
        if not kept:
            continue
        exact, bias = door.dequantize(p, torch.float32), torch.linspace(-1, 1, 40)
        got = door.linear(x, p, bias, out_dtype=torch.float32)
        torch.testing.assert_close(got, (rounded(x) if p.is_quantized else x.float()) @ exact.T + bias, rtol=1e-5, atol=1e-4)
        assert torch.equal(door.linear(x, p, bias), got.bfloat16())
        assert torch.equal(door.linear(x[5:6], p, bias, out_dtype=torch.float32), got[5:6])
        x[3, 9] = float("nan")
        assert not door.linear(x, p)[3].isfinite().any() and door.linear(x, p)[4].isfinite().all()
        assert torch.equal(door.dequantize(p, torch.bfloat16), door.dequantize(w, torch.bfloat16))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"MOTET_CPU_ISA": isa, "PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr[-2000:]

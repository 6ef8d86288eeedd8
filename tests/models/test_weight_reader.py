"""What quantizing at load leaves of a matrix, and that a CPU runs FP8 checkpoints' numbers in its own types."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.linear import dequantize, quantize_fp8, quantize_int8
from motet.models.parameters import RandomSource
from motet.models.weight_reader import Quantize, Rows, WeightReader

SHAPES = {"a.weight": (48, 64), "b.weight": (16, 64)}


@pytest.mark.parametrize(("quantize", "head"), [("fp8", False), ("fp8", True), ("int8", False)])
def test_quantized_at_load_is_what_the_rounded_matrix_says(quantize: Quantize, head: bool) -> None:
    source = RandomSource(SHAPES, seed=0)
    reader = WeightReader(source, SHAPES, dtype=torch.float32, quantize=quantize)
    (weight,) = reader.matrix([Rows("a"), Rows("b", 4, 12)], is_head=head)
    stored = torch.cat([source.get("a.weight"), source.get("b.weight")[4:12]])
    rounded = (quantize_fp8 if quantize == "fp8" and not head else quantize_int8)(stored)
    assert torch.equal(dequantize(weight, torch.float32), dequantize(rounded, torch.float32))
    error = (dequantize(weight, torch.float32) - stored).norm() / stored.norm()
    assert error < (0.04 if quantize == "fp8" and not head else 0.01)
    assert reader.num_bytes == weight.num_bytes


def test_fp8_slices_like_any_matrix_with_a_scale_a_row() -> None:
    from motet.kernels.linear import slice_cols, slice_rows

    whole = quantize_fp8(torch.randn(8, 32))
    exact = dequantize(whole, torch.float32)
    assert torch.equal(dequantize(slice_cols(slice_rows(whole, 2, 6), 16, 32), torch.float32), exact[2:6, 16:])

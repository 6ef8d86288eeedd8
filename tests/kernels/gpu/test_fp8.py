"""FP8 layers whose activations a Triton kernel quantizes, under its interpreter, through the door."""

from __future__ import annotations

import torch

from motet.kernels import dispatch
from motet.kernels.fp8 import fp8_linear, fp8_linear_reference, quantize_rows
from motet.kernels.linear import quantize_fp8


def test_the_door_quantizes_rows_in_triton() -> None:
    ops = dispatch.gpu_ops("cpu")
    x = torch.randn(2, 3, 80).bfloat16()[..., ::2]  # rows are not contiguous
    stored = quantize_fp8(torch.randn(32, 48)).tensors
    x = torch.cat([x, x[..., :8]], -1)
    assert ops is not None and ops.can_quantize_rows(x.flatten(0, 1))
    got = fp8_linear(x, stored["weight"], stored["scale"]).float()
    expected = fp8_linear_reference(x.float(), stored["weight"], stored["scale"])
    assert float((got - expected).norm() / expected.norm()) < 4e-3
    quantized, scale = quantize_rows(torch.zeros(2, 16))
    assert scale.isfinite().all() and not quantized.float().any()

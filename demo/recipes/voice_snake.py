"""Snake alone, and Snake with the depthwise convolution behind it, as one operation each where a CPU trains.

Built with g++ at first use (voice_snake.cpp, under a minute); elsewhere the same in plain torch.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@functools.cache
def _ops() -> Any:
    """The compiled operations, or None without a compiler."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        return None
    from torch.utils.cpp_extension import load

    flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-mprefer-vector-width=512"]
    source = Path(__file__).with_suffix(".cpp")
    return load("voice_snake", [str(source)], extra_cflags=flags, extra_ldflags=["-lmvec", "-lm", "-fopenmp"])


class _Snake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha)
        return _ops().snake_forward(x, alpha)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        dx, da = _ops().snake_backward(grad.contiguous(), *ctx.saved_tensors)
        return dx, da


class _SnakeDepthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
        ctx.save_for_backward(x, alpha, weight)
        ctx.dilation = dilation
        return _ops().depthwise_forward(x, alpha, weight, bias, dilation)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*_ops().depthwise_backward(grad.contiguous(), *ctx.saved_tensors, ctx.dilation), None)


def _fused(x: Tensor) -> bool:
    return not x.is_cuda and x.dtype is torch.float32 and _ops() is not None


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin(alpha x)^2 / alpha; x [B, C, T], alpha [1, C, 1]."""
    if _fused(x):
        return _Snake.apply(x.contiguous(), alpha.flatten())  # type: ignore[no-any-return]
    return x + (alpha * x).sin().square() / (alpha + 1e-9)


def snake_depthwise(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    """A depthwise convolution of 7 taps over snake(x); weight [C, 1, 7], bias [C]. As long as x."""
    if _fused(x):
        out: Tensor = _SnakeDepthwise.apply(x.contiguous(), alpha.flatten(), weight.flatten(1), bias, dilation)
        return out
    return F.conv1d(snake(x, alpha), weight, bias, padding=3 * dilation, dilation=dilation, groups=x.shape[1])

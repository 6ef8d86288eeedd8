"""Normalisations over the last dimension. Sums are taken in fp32 whatever the dtype of the rows.

Letters: R rows, E features. `offset` is added to the weight (Gemma stores weight - 1, so it passes 1.0).
"""

from __future__ import annotations

import torch

from .dispatch import cpu_ops, gpu_ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """x [..., E] / rms(x) * (weight [E] + offset), in x's dtype."""
    if x.is_cpu and (ops := cpu_ops()) is not None and ops.can_norm(x, weight):
        return ops.rms_norm(x, weight, eps, offset)  # type: ignore[no-any-return]
    if (gpu := gpu_ops(x.device.type)) is not None and gpu.can_norm(x, weight):
        return gpu.rms_norm(x, weight, eps, offset=offset)  # type: ignore[no-any-return]
    return rms_norm_reference(x, weight, eps, offset=offset)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """The definition, in fp32 with one rounding at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) in x's dtype, x + residual in fp32) for x [R, E] and residual [R, E] fp32.

    The residual stays fp32 because it is summed over all layers: in bf16 that sum alone costs a third of the logits'
    error (measured on SmolLM2-135M). `residual` may be overwritten by the new one; use the returned one.
    """
    if x.is_cpu and (ops := cpu_ops()) is not None and ops.can_norm(x, weight) and ops.can_norm(residual, weight):
        return ops.rms_norm_residual(x, residual, weight, eps, offset), residual
    if (gpu := gpu_ops(x.device.type)) is not None and gpu.can_norm_residual(x, residual, weight):
        return gpu.rms_norm_residual(x, residual, weight, eps, offset)  # type: ignore[no-any-return]
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset).to(x.dtype), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / std * weight + bias over the last dimension of x [..., E]."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

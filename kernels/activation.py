"""Activations of gated and plain feed-forward blocks.

Letters: R rows, F features of one half. A gated input holds [gate | up] side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dispatch import cpu_ops, gpu_ops


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [R, 2F] -> silu(gate) * up [R, F]."""
    if gate_up.is_cpu and (ops := cpu_ops()) is not None and ops.can_gate(gate_up):
        return ops.gated(gate_up, 0)  # type: ignore[no-any-return]
    if (gpu := gpu_ops(gate_up.device.type)) is not None and gpu.can_gate(gate_up):
        return gpu.silu_mul(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [R, 2F] -> gelu_tanh(gate) * up [R, F]."""
    if gate_up.is_cpu and (ops := cpu_ops()) is not None and ops.can_gate(gate_up):
        return ops.gated(gate_up, 1)  # type: ignore[no-any-return]
    if (gpu := gpu_ops(gate_up.device.type)) is not None and gpu.can_gate(gate_up):
        return gpu.gelu_tanh_mul(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """GELU, exact or in its tanh approximation."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def gated_reference(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The definition of the gated activations ("silu" or "gelu_tanh") in fp32, rounded once. For tests."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    act = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return (act * up).to(gate_up.dtype)

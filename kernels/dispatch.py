"""Which backend a device gets, decided once. CPU: our C++ ops if they are built (or can be); CUDA: our Triton kernels
where Triton is installed; everything else: plain torch.

MOTET_KERNELS=torch forces plain torch, =cpu and =triton ask for one of ours and fail where it is missing. With =triton
and TRITON_INTERPRET=1 the Triton kernels run on CPU tensors too, under Triton's interpreter: that is how they are tested.
MOTET_ATTENTION names an installed library that takes attention on CUDA from Triton: see gpu/libraries.py.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType


def _choice() -> str:
    choice = os.environ.get("MOTET_KERNELS", "auto")
    if choice not in ("auto", "cpu", "torch", "triton"):
        raise ValueError(f"MOTET_KERNELS: expected auto, cpu, torch or triton, got {choice!r}")
    return choice


@functools.cache
def cpu_ops() -> ModuleType | None:
    """The C++ ops (kernels/cpu/ops.py), or None where plain torch does the work. Decided at the first call."""
    choice = _choice()
    if choice in ("torch", "triton"):
        return None
    from .cpu import build

    if not build.load():
        if choice == "cpu":
            raise RuntimeError(f"MOTET_KERNELS=cpu, but the C++ kernels cannot be loaded: {build.why_not()}")
        return None
    from .cpu import ops

    return ops


@functools.cache
def gpu_ops(device_type: str) -> ModuleType | None:
    """The Triton kernels (kernels/gpu/ops.py) for tensors of a device ("cuda", "cpu"), or None: plain torch."""
    choice = _choice()
    if choice == "torch" or device_type not in ("cuda", "cpu") or (device_type == "cpu" and choice != "triton"):
        return None
    if importlib.util.find_spec("triton") is None:
        if choice == "triton":
            raise RuntimeError("MOTET_KERNELS=triton, but Triton is not installed")
        return None
    from .gpu import ops, rounding

    # Compiled kernels cannot touch a CPU tensor; the interpreter can.
    return ops if device_type == "cuda" or rounding.INTERPRETED else None


def backend(device_type: str = "cpu") -> str:
    """Name of the backend for reports: "cpu" (C++ ops), "triton" or "torch"."""
    if device_type == "cpu" and cpu_ops() is not None:
        return "cpu"
    return "torch" if gpu_ops(device_type) is None else "triton"

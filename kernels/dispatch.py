"""Which backend a device gets, decided once. CPU: our C++ ops if they are built (or can be), else plain torch.

MOTET_KERNELS=torch forces plain torch. Other devices run plain torch until they get kernels of their own.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType


@functools.cache
def cpu_ops() -> ModuleType | None:
    """The C++ ops (kernels/cpu/ops.py), or None where plain torch does the work. Decided at the first call."""
    choice = os.environ.get("MOTET_KERNELS", "auto")
    if choice not in ("auto", "cpu", "torch"):
        raise ValueError(f"MOTET_KERNELS: expected auto, cpu or torch, got {choice!r}")
    if choice == "torch":
        return None
    from .cpu import build

    if not build.load():
        if choice == "cpu":
            raise RuntimeError(f"MOTET_KERNELS=cpu, but the C++ kernels cannot be loaded: {build.why_not()}")
        return None
    from .cpu import ops

    return ops


def backend(device_type: str = "cpu") -> str:
    """Name of the backend for reports: "cpu" (C++ ops) or "torch"."""
    return "cpu" if device_type == "cpu" and cpu_ops() is not None else "torch"

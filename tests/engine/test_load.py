"""engine/load.py: what "auto" means."""

from __future__ import annotations

import pytest
import torch

from motet.engine import load
from motet.engine.config import EngineConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [set(), {"amx_bf16"}])
@pytest.mark.parametrize("products", [False, True])
def test_dtype_of_a_cpu(monkeypatch: pytest.MonkeyPatch, flags: set[str], products: bool) -> None:
    """bfloat16 where the CPU multiplies it; a language model also where our kernels widen it."""
    monkeypatch.setattr(load, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(load, "has_bf16_products", lambda: products)
    native = bool(flags)
    auto = EngineConfig()
    assert load.pick_dtype(auto, CPU) == (torch.bfloat16 if native else torch.float32)
    assert load.pick_dtype(auto, CPU, language=True) == (torch.bfloat16 if native or products else torch.float32)
    assert load.pick_dtype(EngineConfig(dtype="float32"), CPU, language=True) == torch.float32
    assert load.pick_dtype(EngineConfig(dtype="bfloat16"), CPU) == torch.bfloat16
    assert load.pick_dtype(EngineConfig(deterministic=True), CPU, language=True) == torch.float32
    assert load.pick_dtype(auto, torch.device("cuda"), language=True) == torch.bfloat16

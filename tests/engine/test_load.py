"""engine/load.py: what "auto" means."""

from __future__ import annotations

import pytest
import torch

from motet.engine import load
from motet.engine.config import EngineConfig
from motet.models.build import is_ours

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [set(), {"amx_bf16"}])
@pytest.mark.parametrize("products", [False, True])
def test_dtype_of_a_cpu(monkeypatch: pytest.MonkeyPatch, flags: set[str], products: bool) -> None:
    """bfloat16 where the CPU multiplies it; our own kernels also where they widen it."""
    monkeypatch.setattr(load, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(load, "has_bf16_products", lambda: products)
    native = bool(flags)
    auto = EngineConfig()
    assert load.pick_dtype(auto, CPU) == (torch.bfloat16 if native else torch.float32)
    assert load.pick_dtype(auto, CPU, own_products=True) == (torch.bfloat16 if native or products else torch.float32)
    assert load.pick_dtype(EngineConfig(dtype="float32"), CPU, own_products=True) == torch.float32
    assert load.pick_dtype(EngineConfig(dtype="bfloat16"), CPU) == torch.bfloat16
    assert load.pick_dtype(EngineConfig(deterministic=True), CPU, own_products=True) == torch.float32
    assert load.pick_dtype(auto, torch.device("cuda"), own_products=True) == torch.bfloat16


def test_whose_products_are_ours() -> None:
    assert is_ours({"model_type": "llama"}) and is_ours({"model_type": "mixtral"})
    assert not is_ours({"model_type": "gpt2"}) and not is_ours({})

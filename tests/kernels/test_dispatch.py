"""The choice of a backend: one word of the environment, a device, and what is installed."""

from __future__ import annotations

import importlib.util

import pytest

from motet.kernels import dispatch


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are made once a process; here at every call, and the process keeps its own."""
    for name in ("cpu_ops", "gpu_ops"):
        monkeypatch.setattr(dispatch, name, getattr(dispatch, name).__wrapped__)


def test_torch_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_KERNELS", "torch")
    assert dispatch.cpu_ops() is None and dispatch.gpu_ops("cuda") is None
    assert dispatch.backend("cpu") == dispatch.backend("cuda") == "torch"


def test_cpu_tensors_take_triton_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOTET_KERNELS", raising=False)
    assert dispatch.gpu_ops("cpu") is None
    assert dispatch.gpu_ops("meta") is None and dispatch.backend("mps") == "torch"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    monkeypatch.delenv("MOTET_KERNELS", raising=False)
    assert dispatch.backend("cuda") == "torch"
    monkeypatch.setenv("MOTET_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="not installed"):
        dispatch.gpu_ops("cuda")


def test_an_unknown_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, cpu, torch or triton"):
        dispatch.cpu_ops()

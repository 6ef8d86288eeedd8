"""Kernel tests run on each backend that this machine has: plain torch, and the C++ ops where they can be built."""

from __future__ import annotations

import pytest

from motet.kernels import activation, attention, norm, rotary, sampling
from motet.kernels.cpu import build

DOORS = (activation, attention, norm, rotary, sampling)


@pytest.fixture(params=["torch", "cpu"] if build.load() else ["torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend that all doors use during the test."""
    ops = None
    if request.param == "cpu":
        from motet.kernels.cpu import ops
    for door in DOORS:
        monkeypatch.setattr(door, "cpu_ops", lambda: ops)
    return str(request.param)

"""The Triton kernels on CPU tensors, under Triton's interpreter, through the doors.

The interpreter must be chosen before anything imports Triton, so `make test` gives this folder a process of its own:
TRITON_INTERPRET=1 python -m pytest tests/kernels/gpu
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from motet.kernels import dispatch

if importlib.util.find_spec("triton") is None:  # torch brings it on Linux with CUDA; elsewhere there is nothing to test
    collect_ignore_glob = ["test_*.py"]
TOO_LATE = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if not TOO_LATE:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if TOO_LATE:
        pytest.fail(
            "Triton was imported without its interpreter before these tests were collected. Run them alone:"
            " TRITON_INTERPRET=1 python -m pytest tests/kernels/gpu (as `make test` does), and everything else with"
            " --ignore=tests/kernels/gpu",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def doors_lead_to_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every door in kernels/ takes the Triton kernels during a test, for CPU tensors too."""
    monkeypatch.setenv("MOTET_KERNELS", "triton")
    for choice in (dispatch.cpu_ops, dispatch.gpu_ops):
        choice.cache_clear()
    assert dispatch.backend("cpu") == "triton"
    with np.errstate(all="ignore"):  # the interpreter computes with numpy; infinities are meant
        yield
    for choice in (dispatch.cpu_ops, dispatch.gpu_ops):
        choice.cache_clear()

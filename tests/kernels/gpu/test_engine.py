"""A whole engine on the Triton kernels says what one on plain torch says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet.kernels import dispatch

from ... import tiny


def said(model: Path, **config: Any) -> list[list[int]]:
    """A long prompt with repeats (drafts are found in it), a short one, and a drawn answer, batched."""
    long = tiny.prompt(7) * 3
    requests = [
        tiny.request(long, max_tokens=5),
        tiny.request(tiny.prompt(3, seed=1), max_tokens=4),
        tiny.request(tiny.prompt(2, seed=2), max_tokens=4, temperature=1.0, top_p=0.9, seed=11),
    ]
    return tiny.answers(tiny.engine(model, deterministic=False, **config), requests)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (tiny.llama, {"speculation": "ngram"}),
        (tiny.windowed, {}),  # windows, soft caps, norms with an offset, gelu
    ],
)
def test_triton_says_what_torch_says(
    model: Callable[[], Path], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = said(model(), **config)
    monkeypatch.setenv("MOTET_KERNELS", "torch")
    for choice in (dispatch.cpu_ops, dispatch.gpu_ops):
        choice.cache_clear()
    assert dispatch.backend("cpu") == "torch"
    assert ours == said(model(), **config)

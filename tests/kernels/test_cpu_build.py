"""The C++ library: refused with a reason where it cannot be built, right on every instruction set that it holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.kernels import activation, attention, norm, rotary, sampling
from motet.kernels.cpu import build


def usable_instruction_sets() -> list[str]:
    """Those that the library holds and this CPU has; none without a compiler."""
    if not build.load():
        return []
    from motet.kernels.cpu import ops

    names = list(build.instruction_sets(build.platform.machine()))
    return names[: names.index(ops.instruction_set()) + 1]


@pytest.fixture(params=usable_instruction_sets() or ["torch"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the instruction sets, in use during the test; plain torch where the library cannot be built."""
    if request.param == "torch":
        yield "torch"
        return
    from motet.kernels.cpu import ops

    best = ops.instruction_set()
    assert ops.use_instruction_set(request.param)
    yield request.param
    ops.use_instruction_set(best)


def test_instruction_sets_agree_with_the_references(instruction_set: str) -> None:
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q, kv = torch.randn(5, 6, 40).to(dtype), torch.randn(90, 2, 2, 8, 40).to(dtype)
        position = torch.tensor([4, 300, 301, 302, 303])
        batch = attention.PagedBatch(
            seq=torch.tensor([0, 1, 1, 1, 1]),
            position=position,
            slots=(position,),
            num_visible=position + 1,
            block_tables=(torch.randperm(80).view(2, 40).int(),),
            kv_lens=torch.tensor([5, 304]),
            row_starts=torch.tensor([0, 1, 5]),
            mark="mixed",
            max_kv_len=304,
            block_size=8,
        )
        options: dict[str, Any] = {"scale": 0.2, "window": 280, "soft_cap": 9.0}
        out = attention.paged_attention(q, kv, batch, 0, **options)
        want = attention.paged_attention_reference(q, kv, batch, 0, **options)[0]
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(out.double(), want, **close)
        x, weight = torch.randn(4, 90).to(dtype), torch.randn(90).to(dtype)
        torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5), **close)
        torch.testing.assert_close(activation.silu_mul(x), activation.gated_reference(x, "silu"), **close)
        cos, sin = rotary.Rotary(40).cos_sin(position)
        for ours, heads in zip(rotary.apply_rotary(q.clone(), q[:, :2].clone(), cos, sin), (q, q[:, :2]), strict=True):
            torch.testing.assert_close(ours, rotary.rotate_reference(heads, cos, sin), **close)
    n = 40
    rows = sampling.SamplingRows(
        temperature=torch.full((n,), 0.8),
        top_k=torch.tensor([0, 50] * 20),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.8] * 10),
        min_p=torch.zeros(n),
        noise_seed=torch.arange(n),
        noise_position=torch.arange(n),
    )
    logits = torch.randn(n, 2003) * 3
    assert torch.equal(sampling.sample(logits, rows), sampling.sample_reference(logits, rows))


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_environment_chooses_once() -> None:
    code = "from motet.kernels import dispatch; print(dispatch.backend(), dispatch.backend('cuda'))"
    assert run(code, MOTET_KERNELS="torch").stdout.split() == ["torch", "torch"]
    wrong = run(code, MOTET_KERNELS="fast")
    assert wrong.returncode != 0 and "expected auto, cpu, torch or triton, got 'fast'" in wrong.stderr


def test_no_compiler_is_a_reason_and_not_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "folders", lambda: [tmp_path])
    monkeypatch.setattr(build, "compiler", lambda: None)
    build.load.cache_clear()
    try:
        assert build.load() is False and "no C++ compiler" in build.why_not()
    finally:
        monkeypatch.undo()
        build.load.cache_clear()


def test_compile_error_is_a_reason_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "folders", lambda: [tmp_path / "unmade" / "cache"])
    monkeypatch.setattr(build, "compiler", lambda: "false")
    with pytest.raises(RuntimeError, match="false"):
        build.build()
    assert [path.name for path in (tmp_path / "unmade" / "cache").iterdir()] == [".lock"]


def test_name_follows_sources_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    monkeypatch.setattr(build.torch, "__version__", "0.0")
    assert build.library_name() != before

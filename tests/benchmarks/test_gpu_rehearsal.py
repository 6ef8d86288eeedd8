"""benchmarks/gpu.py at toy size on a CPU: every claim is measured, with nothing importable but what the lent machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from motet.benchmarks import gpu, gpu_diffusion, gpu_speech
from motet.benchmarks.claims import KEYS

# Runs the script as the lent machine would: no installed motet, and of third parties only torch, triton, numpy and theirs.
BARE = """
import runpy, sys
missing = {"msgspec", "tokenizers", "transformers", "starlette", "jiwer", "gguf", "motet_demo"}
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(name)
sys.meta_path[:] = [Bare()] + [finder for finder in sys.meta_path if "editable" not in repr(finder)]
try:
    import motet
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("motet is installed here: the link proves nothing")
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", [gpu, gpu_speech, gpu_diffusion])
def test_every_claim_is_measured_on_a_bare_machine(tmp_path: Path, script: ModuleType) -> None:
    out = tmp_path / "gpu.json"
    ran = subprocess.run(
        [sys.executable, "-c", BARE, str(script.__file__), "--toy", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text())
    assert [row["claim"] for row in rows] == [claim.id for claim in script.CLAIMS]
    for row in rows:
        assert list(row) == list(KEYS)
        assert row["ours"] and row["ours"] > 0 and row["peer"] > 0, row["why"]
        assert row["ratio"] == row["ours"] / row["peer"] and row["runs"] == gpu.SMALL.repeats
        assert row["holds"] is False and row["why"].startswith(gpu.TOY_WORDS)  # nobody shall take toys for claims
    assert all(f"\n{claim.id} " in ran.stdout for claim in script.CLAIMS)


def test_the_bounds_count_what_a_step_reads() -> None:
    model = gpu.model_of("8b", gpu.SMALL)
    config = model.config
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert config.tie_embeddings
    assert gpu.read_bytes(model) == 2 * (2 * (per_layer + 2 * 64) + 64 + 256 * 64)
    limits = gpu.Limits(bytes_per_s=1e9, flops_per_s=1e12)
    found = gpu.decode("8b", 1)(gpu.SMALL, limits)
    kv_bytes = 3 * 20 * 2 * 2 * 2 * 16 * 2
    assert abs(found.peer - 3 / ((gpu.read_bytes(model) + kv_bytes) / 1e9)) < 1e-6 * found.peer


@pytest.mark.parametrize(
    ("better", "ours", "holds"), [("higher", 0.9, True), ("higher", 0.7, False), ("lower", 0.7, True)]
)
def test_a_claim_holds_on_its_side_of_the_target(better: str, ours: float, holds: bool) -> None:
    found = gpu.Measure(ours=ours, peer=1.0, peer_name="bound", unit="us")
    claim = gpu.Claim(id="x", better=better, target=0.8, measure=lambda sizes, limits: found)
    row = gpu.row_of(claim, gpu.FULL, gpu.Limits(bytes_per_s=1.0, flops_per_s=1.0))
    assert row["holds"] is holds and row["ratio"] == ours and row["why"] == ""


def test_a_claim_that_fails_or_is_late_is_a_row() -> None:
    limits = gpu.Limits(bytes_per_s=1e9, flops_per_s=1e12)

    def wrong(sizes: gpu.Sizes, limits: gpu.Limits) -> gpu.Measure:
        return gpu.compare([lambda: None], [lambda: None], sizes, "nobody", error=0.5, most=0.01)

    for measure, words in ((wrong, "wrong result: relative error 0.5"), (gpu._late, "its turn did not come")):
        row = gpu.row_of(gpu.Claim(id="x", better="lower", target=1.0, measure=measure), gpu.SMALL, limits)
        assert list(row) == list(KEYS) and row["holds"] is False and row["ratio"] is None and words in row["why"]
        assert "x" in gpu.table([row])

"""benchmarks/kernels.py at toy length: every door runs beside torch, and the row says both."""

from __future__ import annotations

import json
from pathlib import Path

from motet.benchmarks.kernels import cases, main


def test_every_door_runs(tmp_path: Path) -> None:
    assert main(["--seconds", "0.0001", "--json", str(tmp_path / "k.json"), "--threads", "1"]) == 0
    rows = json.loads((tmp_path / "k.json").read_text())
    assert [row["door"] for row in rows] == list(cases())
    assert all(row["ours_us"] > 0 and row["torch_us"] > 0 for row in rows)

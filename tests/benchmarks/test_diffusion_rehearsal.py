"""benchmarks/diffusion.py at sizes that mean nothing, on a model with random weights; its arithmetic; the timeline."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from motet.benchmarks import diffusion
from motet.benchmarks.claims import KEYS
from motet.benchmarks.diffusion_claims import speed
from motet.benchmarks.diffusion_claims.overlap import Work, draw, steady
from motet.benchmarks.diffusion_claims.setting import CLAIMS, Setting, Sizes, held_out
from motet.benchmarks.peer_worker import PEERS, PeerError
from motet.engine.config import EngineConfig, PictureConfig
from motet.engine.types import ModelInfo

from ..tiny import tiny_picture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture(tmp_path_factory.mktemp("pictures") / "tiny")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(speed, "SETTLE_S", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows_of(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    out = tmp_path / "rows.json"
    assert diffusion.main(["--rehearse", "--threads", "1", "--json", str(out), *arguments]) == 0
    return {row["claim"]: row for row in json.loads(out.read_text())}


def test_a_rehearsal_measures_every_claim(tmp_path: Path, model: Path) -> None:
    picture = tmp_path / "timeline.svg"
    rows = rows_of(tmp_path, "--model", str(model), "--timeline", str(picture), "--dtype", "float32")
    assert list(rows) == list(CLAIMS)
    for row in rows.values():
        assert list(row) == list(KEYS)
        assert row["ours"] > 0 and row["peer"] > 0 and row["ratio"] == pytest.approx(row["ours"] / row["peer"])
        assert row["holds"] is False and row["why"].startswith("a rehearsal")
    for name in ("one_image", "concurrent8", "late_joiner"):
        assert "diffusers 0." in rows[name]["peer_name"] and "float32" in rows[name]["peer_name"]
    # Both paint the same pictures: in fp32 they differ by rounding.
    assert "differ by 0.0" in rows["one_image"]["why"]
    assert rows["overlap"]["ratio"] >= 1 and "denoise" in rows["overlap"]["why"]
    assert "held-out" in rows["step_cache"]["why"]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_a_cache_that_moves_the_latents_too_far_does_not_hold(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusion, "REHEARSAL", dataclasses.replace(diffusion.REHEARSAL, max_error=1e-9))
    row = rows_of(tmp_path, "--model", str(model), "--only", "step_cache")["step_cache"]
    assert row["ours"] is row["peer"] is None and "none keeps the bound" in row["why"]


class IdlePainter:
    """In the place of MotetPainter, where nobody gets as far as painting."""

    info = ModelInfo(
        model="m", kind="image", source="", max_model_len=0, vocab_size=0, hidden_size=0, dtype="float32",
        extra={"guidance_scale": 2.0, "sizes": [[64, 64]]},
    )  # fmt: skip

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> IdlePainter:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("model_missing", [False, True])
def test_a_peer_that_is_missing_costs_its_claims_only(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, model_missing: bool
) -> None:
    def absent(*_: object) -> None:
        raise PeerError("it ended: no diffusers here")

    monkeypatch.setattr(diffusion, "MotetPainter", IdlePainter)
    monkeypatch.setattr(speed, "PeerWorker", absent)
    if model_missing:  # a folder in diffusers' own layout
        (tmp_path / "other").mkdir()
        monkeypatch.setattr(speed, "resolve", lambda name: SimpleNamespace(path=tmp_path / "other"))
    rows = rows_of(tmp_path, "--model", str(model), "--only", "one_image,late_joiner")
    told = "has another" if model_missing else "no diffusers here"
    assert [row["peer"] for row in rows.values()] == [None, None]
    assert all(told in row["why"] for row in rows.values())


def test_the_peer_paints_a_batch_as_it_paints_each(tmp_path: Path, model: Path) -> None:
    spec = importlib.util.spec_from_file_location("run_diffusers", PEERS / "run_diffusers.py")
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    command: dict[str, Any] = {"steps": 3, "guidance": 2.0, "width": 64, "height": 64, "seeds": [5, 6]}
    command |= {"prompts": ["a red apple", "two small blue cat on the green background"]}
    with torch.inference_mode():
        peer = worker.Engine(model, torch.float32, compiled=False)
    found = []
    for batch in (1, 2):
        file = tmp_path / f"{batch}.npy"
        told = peer.pictures(command | {"batch": batch, "file": str(file)})
        assert len(told["times"]) == 2 // batch and told["seconds"] > 0
        found.append(np.load(file).astype(int))
    assert found[0].shape == (2, 64, 64, 3) and np.abs(found[0] - found[1]).max() <= 1
    assert np.abs(found[0][0] - found[0][1]).max() > 10


def test_captions_are_new_each_time_and_held_out_ones_are_many() -> None:
    setting = Setting(model="m", engine=EngineConfig(), pictures=PictureConfig(), threads=1, sizes=Sizes())
    many = setting.fresh(400) + setting.fresh(400)
    assert len(set(many)) == len(many) == 800 and all(len(caption.split()) <= 14 for caption in many)
    sizes = Sizes()
    assert len(held_out()) >= sizes.num_held_out + sizes.num_calibration
    assert [speed.p95(list(range(count))) for count in (1, 20, 40)] == [0, 19, 38]


def work(stage: str, began: float, ended: float) -> Work:
    return Work(stage=stage, began=began, ended=ended)


def test_a_steady_load_has_no_beginning_and_no_end() -> None:
    works = [work("encode", at, at + 0.1) for at in range(10)]
    works += [work("denoise", at + 0.1, at + 1) for at in range(10)]
    works += [work("decode", at + 1, at + 1.2) for at in range(10)]
    inner = steady(works)
    assert min(one.began for one in inner) >= 3.2 and max(one.ended for one in inner) <= 9.2
    assert {one.stage for one in inner} == {"encode", "denoise", "decode"}
    drawn = draw([dataclasses.replace(one, began=one.began / 10, ended=one.ended / 10) for one in inner])
    assert drawn.count("#43a047") == sum(one.stage == "denoise" for one in inner)

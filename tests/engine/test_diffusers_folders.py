"""Folders in diffusers' layout, through the engine: each picture of a mixed batch is what its pipeline makes of it alone."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet.engine.blobs import from_blob
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.diffusion_load import picture_model
from motet.engine.types import Done, ImageRequest, ModelInfo, Picture

from ..models.picture_encoders import flux_pipeline, qwen_pipeline, sd3_pipeline

CPU = torch.device("cpu")
SIZES = ((48, 32), (32, 32))


@functools.cache
def made(family: str) -> tuple[Any, Path]:
    """A tiny random pipeline and its folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"motet-hub-{family}-")) / family
    make = {
        "flux": flux_pipeline,
        "schnell": functools.partial(flux_pipeline, guided=False),
        "qwen-image": qwen_pipeline,
        "sd3": sd3_pipeline,
    }[family]
    return make(folder), folder


def engine(family: str) -> DiffusionEngine:
    model = picture_model(made(family)[1], dtype=torch.float32, devices=(CPU, CPU, CPU))
    return DiffusionEngine(
        info=ModelInfo(model=family, kind="image", source="", max_model_len=0, vocab_size=0, hidden_size=0),
        painter=model.painter,
        rules=dataclasses.replace(model.rules, sizes=SIZES),
        begin_solver=model.begin_solver,
        max_step_cost=1e9,
    )


def run(one: DiffusionEngine, requests: list[ImageRequest]) -> dict[tuple[str, int], np.ndarray[Any, Any]]:
    for each in requests:
        one.submit(each)
    pause = threading.Event()
    events = (
        one.step()
    )  # the encoder begins; all are encoded before the first picture is, so that they share their steps
    while any(making.job and making.job.result is None for making in one._requests.values()):
        pause.wait(0.001)
    while one.num_requests():
        if one.has_work():
            events += one.step()
        else:
            pause.wait(0.001)
    one.close()
    assert one.last_error is None and sum(isinstance(event, Done) for event in events) == len(requests)
    return {
        (event.request_id, event.index): from_blob(event.image).numpy()
        for event in events
        if isinstance(event, Picture)
    }


def theirs(family: str, request: ImageRequest, index: int) -> np.ndarray[Any, Any]:
    pipeline = made(family)[0]
    guidance: dict[str, Any] = {"guidance_scale": request.guidance_scale}
    if family == "qwen-image":
        guidance = {"true_cfg_scale": request.guidance_scale, "negative_prompt": request.negative_prompt}
    elif family == "sd3":
        guidance["negative_prompt"] = request.negative_prompt
    elif family == "schnell":
        guidance = {}
    shown = pipeline(
        prompt=request.prompt,
        width=request.width or SIZES[0][0],
        height=request.height or SIZES[0][1],
        num_inference_steps=request.num_steps,
        generator=torch.Generator().manual_seed(request.seed + index),
        output_type="np",
        **guidance,
    ).images[0]
    pixels: np.ndarray[Any, Any] = (shown * 255).round().astype("uint8")
    return pixels


def requests(family: str) -> list[ImageRequest]:
    """Prompts of different lengths, other numbers of steps, guidance with and without, other sizes, two pictures of one."""
    cfg = family in ("qwen-image", "sd3")
    told: list[dict[str, Any]] = [
        {"prompt": "a red apple", "num_steps": 3, "guidance_scale": 3.0, "negative_prompt": "blurry" if cfg else ""},
        {"prompt": "two small cats, on the left", "num_steps": 2, "guidance_scale": 1.0, "n": 2},
        {"prompt": "an owl", "num_steps": 4, "guidance_scale": 2.0, "width": 32, "height": 32},
    ]
    for one in told:
        if family == "schnell":
            one["guidance_scale"] = None
    return [ImageRequest(request_id=str(at), model=family, seed=7 * at + 1, **one) for at, one in enumerate(told)]


@pytest.mark.parametrize("family", ["flux", "schnell", "qwen-image", "sd3"])
@torch.inference_mode()
def test_pictures_of_a_mixed_batch_are_their_pipelines_own(family: str) -> None:
    asked = requests(family)
    one = engine(family)
    found = run(one, asked)
    assert len(found) == 4
    guided = 2 if family in ("qwen-image", "sd3") else 1  # rows of a guided picture
    assert one.counters.num_rows == 3 * guided + 2 * 2 + 4 * guided
    assert one.counters.num_steps == 3 + 4  # of one size three pictures, of the other one
    for request in asked:
        for index in range(request.n):
            ours, expected = found[request.request_id, index].astype(int), theirs(family, request, index).astype(int)
            assert expected.std() > 5  # a picture with something on it
            assert abs(ours - expected).max() <= 1, (family, request.request_id, abs(ours - expected).mean())

"""Which batch an engine starts with, and that it starts warm."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet.engine.client import InlineClient
from motet.engine.config import EngineConfig, HostConfig, PictureConfig
from motet.engine.diffusion_load import PictureModel, best_rows, load_image, start_engine
from motet.engine.errors import ModelLoadError
from motet.engine.load import build_engine
from motet.engine.step_cache import CacheConfig
from motet.engine.types import Done, ImageRequest, ModelInfo, Picture
from motet.models.diffusion_folder import FAMILIES

from ..models.picture_encoders import flux_pipeline, qwen_pipeline, sd3_pipeline
from ..tiny import tiny_picture
from .scripted_adapter import RULES, ScriptedPainter, StraightRun, ends, request, run


def model(painter: ScriptedPainter) -> PictureModel:
    return PictureModel(
        family="scripted", painter=painter, rules=RULES, begin_solver=StraightRun, dtype="float32", weight_bytes=1
    )


def test_a_batch_is_as_large_as_costs_nothing() -> None:
    assert best_rows(lambda rows: 0.01 + 0.001 * rows, most=64, limit_s=1.0) == 64
    assert best_rows(lambda rows: 0.01 * rows, most=64, limit_s=0.1) == 8  # bound by arithmetic: no gain, no loss
    assert best_rows(lambda rows: 0.01 + 0.001 * rows, most=64, limit_s=0.03) == 16
    assert best_rows(lambda rows: 0.001 * max(4, rows) * (2 if rows > 16 else 1), most=64, limit_s=1.0) == 16
    assert best_rows(lambda rows: 0.01 if rows != 2 else 0.2, most=16, limit_s=1.0) == 16  # somebody else's moment
    assert best_rows(lambda rows: 9.0, most=1, limit_s=1.0) == 1
    assert best_rows(lambda rows: 9.0, most=4, limit_s=1.0) == 1


def test_an_engine_starts_warm_and_clean() -> None:
    painter = ScriptedPainter()
    phases: list[str] = []
    ticks = iter(range(10**9))
    one = start_engine(
        "fake", Path("/nowhere"), model(painter), report=phases.append, clock=lambda: next(ticks) * 1e-6, max_rows=8
    )
    assert phases == ["warm-up", "ready"] and "decode ends" in painter.log and painter.batches
    assert one.info.kind == "image" and one.info.extra["sizes"] == [[16, 16], [32, 16]]
    assert one.info.extra["step_rows"] == 8  # by this clock every pass takes as long
    assert one.stats()["pictures"] == one.stats()["requests"] == 0
    assert isinstance(ends(run(one, request("a")))["a"], Done)
    one.close()


def test_a_model_that_cannot_make_a_picture_does_not_load() -> None:
    class Broken(ScriptedPainter):
        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            if self.batches and len(self.batches) > 1:
                raise RuntimeError("no picture")
            return super().decode(latents)

    with pytest.raises(RuntimeError, match="no picture"):
        start_engine("fake", Path(), model(Broken()), max_step_rows=2)
    tea = CacheConfig(policy="teacache", threshold=0.1, coefficients=(0.0,) * 5)
    few = replace(model(ScriptedPainter()), rules=replace(RULES, sigmas=(1.0, 0.5)))
    with pytest.raises(ModelLoadError):
        start_engine("fake", Path(), few, cache=tea, max_step_rows=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model in motet-emoji's layout, and a few-step one."""
    root = tmp_path_factory.mktemp("pictures")
    return tiny_picture(root / "plain"), tiny_picture(root / "few", few_step=True)


def pictures_of(model: Path, *requests: ImageRequest, **config: Any) -> tuple[ModelInfo, dict[str, Picture]]:
    """Through a host in this process: the model's card, and the picture of each request."""

    async def main() -> tuple[ModelInfo, dict[str, Picture]]:
        client = InlineClient(
            HostConfig(threads=2, engine=EngineConfig(dtype="float32"), pictures=PictureConfig(**config))
        )

        async def one(item: ImageRequest) -> Picture:
            events = [event async for event in client.submit(item)]
            assert isinstance(events[-1], Done), events[-1]
            return next(event for event in events if isinstance(event, Picture))

        try:
            info = await client.load(str(model))
            made = await asyncio.gather(*(one(item) for item in requests))
            return info, {item.request_id: picture for item, picture in zip(requests, made)}
        finally:
            await client.close()

    return asyncio.run(main())


def asked(model: Path, name: str, prompt: str = "a red apple", **fields: Any) -> ImageRequest:
    return ImageRequest(request_id=name, model=str(model), prompt=prompt, **fields)


def test_a_folder_becomes_pictures(folders: tuple[Path, Path]) -> None:
    """The same seed the same picture, in company too; another seed or prompt another one."""
    plain, _ = folders
    requests = [
        asked(plain, "a", seed=1),
        asked(plain, "b", seed=1),
        asked(plain, "c", seed=2),
        asked(plain, "d", "a blue cat on the red background", seed=1, num_steps=7, guidance_scale=1.0),
        asked(plain, "e", seed=1, solver="dpmpp_2m", negative_prompt="cat"),
    ]
    info, made = pictures_of(plain, *requests)
    assert (info.kind, info.dtype, info.extra["family"], info.extra["sizes"]) == (
        "image",
        "float32",
        "flux",
        [[64, 64]],
    )
    assert info.extra["solvers"] and info.extra["guidance_scale"] == 2.0 and info.extra["num_steps"] == 4
    pixels = {name: np.frombuffer(picture.image.data, np.uint8).astype(int) for name, picture in made.items()}
    assert len(pixels["a"]) == 64 * 64 * 3
    assert np.abs(pixels["a"] - pixels["b"]).max() <= 1  # rounding may fall the other way in another batch
    for name in "cde":
        assert np.abs(pixels["a"] - pixels[name]).max() > 1
    _, alone = pictures_of(plain, requests[3], image_step_rows=1)
    assert np.abs(np.frombuffer(alone["d"].image.data, np.uint8).astype(int) - pixels["d"]).max() <= 1


def test_a_few_step_model_and_its_limits(folders: tuple[Path, Path]) -> None:
    _, few = folders
    info, made = pictures_of(few, asked(few, "a", seed=3))
    assert info.extra["few_step"] and info.extra["num_steps"] == 2 and made["a"].seed == 3
    with pytest.raises(ModelLoadError, match="few steps"):
        load_image(str(few), config(image_cache="first_block", image_cache_threshold=0.1))


def test_what_a_host_may_choose(folders: tuple[Path, Path]) -> None:
    plain, _ = folders
    settings = config(
        image_attention="sage",
        image_weights="fp8",
        image_cache="first_block",
        image_cache_threshold=0.2,
        image_step_rows=4,
    )
    engine = load_image(str(plain), settings)
    assert isinstance(ends(run(engine, asked(plain, "a", num_steps=12)))["a"], Done)
    assert engine.info.extra["step_rows"] == 4
    engine.close()
    with pytest.raises(ValueError, match="image_cache_threshold"):
        PictureConfig(image_cache_threshold=-1.0)
    with pytest.raises(ModelLoadError, match="five coefficients"):
        load_image(str(plain), config(image_cache="teacache", image_cache_threshold=0.1))


def config(**pictures: Any) -> HostConfig:
    return HostConfig(engine=EngineConfig(dtype="float32", device="cpu"), pictures=PictureConfig(**pictures))


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "motet_image.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="family"):
        build_engine(str(tmp_path), HostConfig(), lambda phase: None)


@pytest.mark.parametrize("guided", [True, False])
def test_flux_in_the_layout_of_diffusers_makes_its_pipelines_picture(
    guided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As -dev (guidance embedded, levels shifted by size) and as -schnell: prompt in, pixels out."""
    theirs = flux_pipeline(tmp_path / "hub", guided=guided)
    monkeypatch.setitem(FAMILIES, "flux", replace(FAMILIES["flux"], sizes=((64, 32),)))
    info, made = pictures_of(tmp_path / "hub", asked(tmp_path / "hub", "a", "a cat", seed=5, num_steps=3))
    assert info.extra["guidance"] == ("embedded" if guided else "none")
    expected = theirs(
        "a cat", width=64, height=32, num_inference_steps=3, guidance_scale=3.5, output_type="np",
        generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip
    image = made["a"].image
    pixels = np.frombuffer(image.data, np.uint8).reshape(image.shape)
    assert np.abs(pixels - 255 * expected).max() < 1.5


@pytest.mark.parametrize("family", ["qwen-image", "sd3"])
def test_other_families_in_the_layout_of_diffusers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    {"qwen-image": qwen_pipeline, "sd3": sd3_pipeline}[family](tmp_path / "hub")
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], sizes=((32, 32), (32, 64))))
    hub = tmp_path / "hub"
    info, made = pictures_of(
        hub, asked(hub, "a", num_steps=2), asked(hub, "b", num_steps=3, width=32, height=64, negative_prompt="blue")
    )
    assert info.extra["family"] == family and info.extra["guidance"] == "cfg"
    assert [tuple(made[name].image.shape) for name in "ab"] == [(32, 32, 3), (64, 32, 3)]

"""The ImageGeneration pipeline over the real engine with a scripted model: whole and streamed, sync and async."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from motet import ImageGeneration
from motet.engine.errors import InternalError, InvalidRequest, ModelNotFound, Unavailable, UnsupportedParameter
from motet.pipelines.image import ImageStream, parse_size
from motet.pipelines.types import ImageProgress, MadePicture

from .. import tiny
from ..engine.scripted_adapter import RULES
from .scripted_pictures import MODEL, Studio

PROMPT = "a red apple on a blue background"


@pytest.fixture
def studio() -> Iterator[Studio]:
    studio = Studio()
    with studio.hub:
        yield studio


@pytest.fixture
def pictures(studio: Studio) -> ImageGeneration:
    return ImageGeneration(MODEL, hub=studio.hub)


@pytest.fixture
def slow() -> Iterator[tuple[Studio, ImageGeneration]]:
    studio = Studio(step_s=0.003)
    with studio.hub:
        yield studio, ImageGeneration(MODEL, hub=studio.hub)


def pixels(image: Image.Image) -> Any:
    return np.asarray(image).tolist()


def test_a_prompt(pictures: ImageGeneration) -> None:
    image = pictures(PROMPT, seed=5)
    assert isinstance(image, Image.Image) and image.mode == "RGB" and image.size == (16, 16) == pictures.sizes[0]
    assert image.info["seed"] == 5 and pictures.info.kind == "image" and pictures.card.num_steps == 4
    assert pixels(pictures(PROMPT, seed=5)) == pixels(image) != pixels(pictures(PROMPT, seed=6))
    drawn = {pictures(PROMPT).info["seed"] for _ in range(3)}
    assert len(drawn) == 3
    (drawn_seed, *_) = drawn
    assert pictures(PROMPT, seed=drawn_seed).info["seed"] == drawn_seed


def test_several_of_one_prompt(pictures: ImageGeneration) -> None:
    three = pictures(PROMPT, n=3, seed=5)
    assert [image.info["seed"] for image in three] == [5, 6, 7]
    assert [pixels(image) for image in three] == [pixels(pictures(PROMPT, seed=seed)) for seed in (5, 6, 7)]
    (only,) = [pictures(PROMPT, n=1)]
    assert isinstance(only, Image.Image)


def test_several_prompts_in_order(pictures: ImageGeneration, studio: Studio) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(20)]
    images = pictures(prompts, seed=1)
    assert [pixels(image) for image in images[:2]] == [pixels(pictures(prompt, seed=1)) for prompt in prompts[:2]]
    assert len(images) == 20 and max(map(len, studio.painter.batches)) > 2, "they share passes"
    assert [len(two) for two in pictures(prompts[:3], n=2)] == [2, 2, 2]
    assert pictures([]) == []
    with pytest.raises(InvalidRequest) as caught:
        pictures(["fine so far", " "])
    assert caught.value.param == "prompt"


def test_sizes(pictures: ImageGeneration) -> None:
    for options in ({"size": "32x16"}, {"size": (32, 16)}, {"size": [32, 16]}, {"width": 32, "height": 16}):
        assert pictures(PROMPT, steps=1, **options).size == (32, 16)  # type: ignore[call-overload]
    assert pictures(PROMPT, steps=1, size="auto").size == (16, 16)
    assert parse_size(None) is None and parse_size("7X9") == (7, 9) and parse_size((np.int64(7), 9)) == (7, 9)


NO_SIZES = ["", "32", "32x", "x16", "-32x16", "32x16x3", "0x0", "1e3x16", "９x９", 7, (32.0, 16), (True, 16), (32,)]


@pytest.mark.parametrize("size", [*NO_SIZES, "1" * 5000 + "x1", None])
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_size(size, *((7, None) if size is None else ()))
    assert caught.value.param in ("size", "height") and len(str(caught.value)) < 120
    with pytest.raises(InvalidRequest):
        parse_size("16x16", 16, 16)


def _truncated() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    return file.getvalue()[:500]


TRUNCATED = Image.open(io.BytesIO(_truncated()))  # a file that Pillow opens, and finds wanting when it is read


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"size": "17x16"}, "size"),
        ({"size": "1x99999"}, "size"),
        ({"width": 16}, "height"),
        ({"steps": 0}, "steps"),
        ({"steps": 10_000}, "steps"),
        ({"steps": "20"}, "steps"),
        ({"steps": True}, "steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": 10**400}, "guidance_scale"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"solver": "magic"}, "solver"),
        ({"negative_prompt": 7}, "negative_prompt"),
        ({"negative_prompt": "\ud800"}, "negative_prompt"),
        ({"negative_prompt": "x" * 10_000}, "negative_prompt"),
        ({"strength": 0.5}, "strength"),
        ({"num_previews": -1}, "num_previews"),
        ({"image": 7}, "image"),
        ({"image": "nowhere.png"}, "image"),
        ({"image": "."}, "image"),
        ({"image": "\0"}, "image"),
        ({"image": b"no picture"}, "image"),
        ({"image": Image.new("RGB", (0, 5))}, "image"),
        ({"image": TRUNCATED}, "image"),
        ({"image": np.zeros((4, 4, 3), np.float32)}, "image"),
        ({"image": np.zeros((4, 4, 2), np.uint8)}, "image"),
        ({"image": np.zeros((0, 4, 3), np.uint8)}, "image"),
        ({"image": np.zeros((4, 4, 3), np.uint8), "strength": 0}, "strength"),
        ({"image": np.zeros((4, 4, 3), np.uint8), "strength": float("nan")}, "strength"),
        ({"sede": 1}, "sede"),
    ],
)
def test_what_cannot_be_asked(pictures: ImageGeneration, studio: Studio, options: dict[str, Any], param: str) -> None:
    for ask in (pictures, pictures.stream):
        with pytest.raises(InvalidRequest) as caught:
            ask(PROMPT, **options)
        assert caught.value.param == param and str(caught.value)
    assert studio.idle() and not studio.painter.batches


@pytest.mark.parametrize("prompt", ["", "  ", "x" * 10_000, "a \ud800 cat", None, 7, b"a cat"])
def test_what_is_no_prompt(pictures: ImageGeneration, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pictures(prompt)
    assert caught.value.param == "prompt"


def test_hints_and_other_models(pictures: ImageGeneration, studio: Studio) -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'seed'"):
        pictures(PROMPT, sede=1)  # type: ignore[call-overload]
    with pytest.raises(ModelNotFound):
        ImageGeneration("other", hub=studio.hub)
    few = Studio(rules=replace(RULES, sigmas=(1.0, 0.5), guidance="none", takes_image=False))
    with few.hub:
        turbo = ImageGeneration(MODEL, hub=few.hub)
        assert turbo(PROMPT, steps=2).size == (16, 16)
        for options in ({"steps": 3}, {"negative_prompt": "blue"}, {"image": np.zeros((4, 4), np.uint8)}):
            with pytest.raises(UnsupportedParameter) as caught:
                turbo(PROMPT, **options)  # type: ignore[call-overload]
            assert [caught.value.param] == list(options)


def test_to_begin_with_a_picture(pictures: ImageGeneration, studio: Studio, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, (32, 64, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    image.save(tmp_path / "wide.png")
    data = (tmp_path / "wide.png").read_bytes()
    sources = [array, image, data, tmp_path / "wide.png", str(tmp_path / "wide.png")]
    made = [pixels(pictures(PROMPT, seed=1, image=source, strength=0.5)) for source in sources]
    assert made == [made[0]] * len(made)
    assert made[0] not in (
        pixels(pictures(PROMPT, seed=1)),
        pixels(pictures(PROMPT, seed=1, image=image, strength=0.9)),
    )
    assert tuple(studio.painter.begun_from[0].shape) == (16, 16, 3)
    grey, clear = np.zeros((16, 16), np.uint8), np.zeros((16, 16, 4), np.uint8)
    for source, value in ((grey, 0), (clear, 255)):
        pictures(PROMPT, image=source)
        assert (studio.painter.begun_from[-1] == value).all()
    stream = pictures.stream(PROMPT, image=image, strength=0.5)
    assert {event.num_steps for event in stream if isinstance(event, ImageProgress)} == {2}
    file = io.BytesIO()
    image.save(file, "WEBP")
    assert len(pictures([PROMPT, "a cat"], image=file.getvalue())) == 2


def test_a_stream(slow: tuple[Studio, ImageGeneration]) -> None:
    _, pictures = slow
    stream = pictures.stream(PROMPT, n=2, seed=3, steps=40, num_previews=3)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.result
    events = list(stream)
    made = [event for event in events if isinstance(event, MadePicture)]
    assert sorted((one.index, one.seed) for one in made) == [(0, 3), (1, 4)]
    for index in (0, 1):
        progress = [event for event in events if isinstance(event, ImageProgress) and event.index == index]
        steps = [event.step for event in progress]
        assert steps == sorted(steps) and steps[-1] == 40 and len(steps) > 1
        previews = [event.preview for event in progress if event.preview is not None]
        assert 1 <= len(previews) <= 3 and all(preview.size == (16, 16) for preview in previews)
    result = stream.result
    assert [pixels(image) for image in result.images] == [pixels(pictures(PROMPT, seed=s, steps=40)) for s in (3, 4)]
    assert result.usage.num_prompt_tokens == len(PROMPT.split())
    assert 0 < result.timing.queue_s <= result.timing.first_picture_s <= result.timing.total_s
    assert all(event.preview is None for event in pictures.stream(PROMPT) if isinstance(event, ImageProgress))


def test_a_slow_reader_hears_the_newest(slow: tuple[Studio, ImageGeneration]) -> None:
    studio, pictures = slow
    stream = pictures.stream(PROMPT, n=3, steps=30, num_previews=20)
    wait_until(lambda: is_finished(stream))
    assert studio.idle()
    events = list(stream)
    assert len(events) == 6, "of each picture the newest progress, and itself"
    assert all(event.step == 30 and event.preview for event in events if isinstance(event, ImageProgress))


def test_leaving_early_frees_the_rows(slow: tuple[Studio, ImageGeneration]) -> None:
    studio, pictures = slow
    for _ in range(10):
        with pictures.stream(PROMPT, n=3, steps=200) as stream:
            assert isinstance(next(stream), ImageProgress)
    wait_until(studio.idle)
    assert studio.engine.counters.num_pictures == 0
    for _ in range(5):
        pictures.stream(PROMPT, steps=200).close()
    wait_until(studio.idle)


def test_closing_ends_everything(slow: tuple[Studio, ImageGeneration]) -> None:
    studio, pictures = slow
    stream = pictures.stream(PROMPT, steps=200)
    next(stream)
    pictures.close()
    assert not studio.hub.closed, "a hub that was given is its owner's"
    studio.hub.close()
    with pytest.raises(Unavailable):
        pictures(PROMPT)


def test_threads_at_once(slow: tuple[Studio, ImageGeneration]) -> None:
    studio, pictures = slow
    alone = [pixels(pictures(PROMPT, seed=seed, steps=6)) for seed in range(4)]
    studio.painter.batches.clear()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: pixels(pictures(PROMPT, seed=seed % 4, steps=6)), range(24)))
    assert found == alone * 6 and max(map(len, studio.painter.batches)) > 2


@pytest.mark.parametrize("word", ["raise", "nan", "undecodable", "unencodable"])
def test_errors_of_the_engine(pictures: ImageGeneration, studio: Studio, word: str) -> None:
    expected = InvalidRequest if word == "unencodable" else InternalError
    with pytest.raises(expected):
        pictures(f"a cat {word}")
    with pytest.raises(expected):
        list(pictures.stream(f"a cat {word}", n=2))
    with pytest.raises(expected):
        pictures([PROMPT, f"a cat {word}", PROMPT])
    wait_until(studio.idle)
    assert pictures(PROMPT).size == (16, 16)


def test_async(slow: tuple[Studio, ImageGeneration]) -> None:
    studio, pictures = slow

    async def run() -> None:
        image = await pictures.call_async(PROMPT, seed=1)
        assert len(await pictures.call_async([PROMPT, "a cat"])) == 2
        async with pictures.stream_async(PROMPT, seed=1) as stream:
            events = [event async for event in stream]
        assert isinstance(events[-1], MadePicture) and pixels(events[-1].image) == pixels(image)
        assert stream.result.images[0] is events[-1].image
        stream = pictures.stream_async(PROMPT, steps=200)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(InvalidRequest):
            await anext(pictures.stream_async(""))
        call = asyncio.create_task(pictures.call_async([PROMPT] * 3, steps=200))
        while studio.engine.num_requests() < 3:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(run())
    wait_until(studio.idle)


def is_finished(stream: ImageStream) -> bool:
    with contextlib.suppress(RuntimeError):
        return bool(stream.result)
    return False


def wait_until(what: object, timeout_s: float = 10.0) -> None:
    """Until `what()` is true; what other threads do takes a moment."""
    assert callable(what)
    done = threading.Event()
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end
        done.wait(0.005)


def test_the_real_engine_paints(tmp_path: Path) -> None:
    """Random weights, all the way from words to pixels: a seed is kept, whole or streamed, alone or beside others."""
    folder = tiny.tiny_picture(tmp_path / "tiny")
    with ImageGeneration(str(folder), threads=1) as pictures:
        image = pictures(PROMPT, seed=3)
        assert image.size == (64, 64) and np.asarray(image).std() > 0
        stream = pictures.stream(PROMPT, n=2, seed=3, num_previews=2)
        events = list(stream)
        assert any(event.preview for event in events if isinstance(event, ImageProgress))
        assert far(stream.result.images[0], image) < 2 < far(stream.result.images[1], image)
        assert far(pictures(PROMPT, seed=3, image=image, strength=0.3), image) > 0
        assert far(pictures(PROMPT, seed=3, negative_prompt="blue"), image) > 0
        with pytest.raises(InvalidRequest) as caught:
            pictures("a cat " * 20)
        assert caught.value.param == "prompt"
    with ImageGeneration(str(tiny.tiny_picture(tmp_path / "few", few_step=True)), threads=1) as pictures:
        assert pictures(PROMPT).size == (64, 64) and pictures.card.rules.few_step
        with pytest.raises(UnsupportedParameter) as refused:
            pictures(PROMPT, negative_prompt="blue")
        assert refused.value.param == "negative_prompt"


def far(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of two pictures, of 255: batched products differ in their last bits."""
    return float(np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).mean())

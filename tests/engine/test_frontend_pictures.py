"""Requests in words to pixels over the real engine and a scripted model: defaults, previews, refusals, leaving."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from motet.engine.client import InlineClient
from motet.engine.config import HostConfig
from motet.engine.diffusion_load import PictureModel, card
from motet.engine.errors import InvalidRequest, MotetError, UnsupportedParameter
from motet.engine.frontend.pictures import (
    FinishedPicture,
    PaintRequest,
    PictureEvent,
    PictureFrontend,
    PictureProgress,
    Pixels,
    preview_every,
    preview_steps,
)
from motet.engine.picture_request import PictureRules
from motet.engine.types import Aborted, Done, Failed, ModelInfo

from .scripted_adapter import INFO, RULES, ScriptedPainter, StraightRun, engine

FEW_STEP = PictureRules(
    sizes=((16, 16),),
    num_steps=2,
    guidance="none",
    solver="euler",
    solvers=("euler",),
    sigmas=(1.0, 0.5),
    takes_image=False,
)


def with_card(rules: PictureRules) -> ModelInfo:
    model = PictureModel(
        family="scripted",
        painter=ScriptedPainter(),
        rules=rules,
        begin_solver=StraightRun,
        dtype="float32",
        weight_bytes=1,
    )
    return INFO.__class__(**{name: getattr(INFO, name) for name in INFO.__struct_fields__} | {"extra": card(model, 4)})


def run(
    work: Callable[[PictureFrontend, InlineClient], Awaitable[Any]],
    *,
    rules: PictureRules = RULES,
    painter: ScriptedPainter | None = None,
) -> Any:
    async def whole() -> Any:
        def build(name: str, config: HostConfig, report: Callable[[str], None]) -> Any:
            made = engine(painter, rules=rules)
            made.info = with_card(rules)
            return made

        client = InlineClient(HostConfig(), build=build)
        try:
            return await work(PictureFrontend(client), client)
        finally:
            await client.close()

    return asyncio.run(whole())


def ask(**fields: Any) -> PaintRequest:
    return PaintRequest(**{"model": "fake", "prompt": "a red apple"} | fields)


def paint(rules: PictureRules = RULES, **fields: Any) -> list[PictureEvent]:
    async def work(frontend: PictureFrontend, client: InlineClient) -> list[PictureEvent]:
        return [event async for event in frontend.paint(ask(**fields))]

    return run(work, rules=rules)  # type: ignore[no-any-return]


def pictures(events: list[PictureEvent]) -> dict[int, FinishedPicture]:
    return {event.index: event for event in events if isinstance(event, FinishedPicture)}


def grey(value: int = 90) -> Any:
    """What opens a picture; `sizes` says how it was asked to be."""

    async def open_image(width: int, height: int) -> Pixels:
        sizes.append((width, height))
        return np.full((height, width, 3), value, np.uint8)

    sizes: list[tuple[int, int]] = []
    open_image.sizes = sizes  # type: ignore[attr-defined]
    return open_image


def test_a_picture_comes_with_its_progress_and_its_seed() -> None:
    events = paint(seed=3)
    progress = [event for event in events if isinstance(event, PictureProgress)]
    assert [(event.step, event.num_steps, event.index) for event in progress] == [(at, 4, 0) for at in (1, 2, 3, 4)]
    assert all(event.preview is None for event in progress)
    (picture,) = pictures(events).values()
    assert picture.seed == 3 and picture.pixels.shape == (16, 16, 3) and picture.pixels.dtype == np.uint8
    assert isinstance(events[-1], Done) and events[-1].usage.num_prompt_tokens == 3


def test_the_same_seed_makes_the_same_picture_and_none_is_drawn() -> None:
    both, alone = pictures(paint(seed=7, n=2)), pictures(paint(seed=8))
    assert both[1].seed == 8 and np.array_equal(both[1].pixels, alone[0].pixels)
    drawn = [pictures(paint())[0].seed for _ in range(3)]
    assert len(set(drawn)) == 3 and all(0 <= seed < 2**32 for seed in drawn)


def test_sizes_and_beginning_from_a_picture() -> None:
    image = grey()
    kept = pictures(paint(image=image, size=(32, 16), strength=0.25, seed=1))[0].pixels
    assert image.sizes == [(32, 16)] and kept.shape == (16, 32, 3)
    forgotten = pictures(paint(size=(32, 16), seed=1))[0].pixels
    new = pictures(paint(image=image, size=(32, 16), strength=1.0, seed=1))[0].pixels
    assert np.array_equal(new, forgotten) and not np.array_equal(kept, forgotten)
    events = paint(image=image, steps=10, seed=1)  # 0.8 of them run
    assert [event.num_steps for event in events if isinstance(event, PictureProgress)] == [8] * 8


# ----------------------------------------------------------------------------------------------------------- previews


def test_previews_are_as_many_as_asked_and_spread_evenly() -> None:
    for num_steps, wanted in itertools.product(range(1, 60), range(1, 12)):
        every, steps = preview_every(num_steps, wanted), preview_steps(num_steps, wanted)
        offered = list(range(every, num_steps, every))
        assert set(steps) <= set(offered) and steps == sorted(set(steps))
        assert len(steps) == min(wanted, num_steps - 1)
        assert len(offered) <= 2 * wanted or every == 1 and num_steps < 2 * wanted + 3
        if steps:
            gaps = np.diff([0, *steps, num_steps])
            ideal = num_steps / (len(steps) + 1)
            assert gaps.max() <= 2.5 * ideal, (num_steps, wanted, steps)
    assert preview_steps(20, 3) == [5, 10, 15] and preview_steps(4, 2) == [1, 3] and preview_steps(9, 0) == []


def test_previews_reach_the_reader() -> None:
    events = paint(steps=20, num_previews=3, n=2)
    for index in range(2):
        seen = [
            event.step
            for event in events
            if isinstance(event, PictureProgress) and event.index == index and event.preview is not None
        ]
        # The decoder may have left one out under way; the next one counts then.
        assert seen and len(seen) <= 3 and set(seen) <= {5, 10, 15}
    assert {
        event.preview.shape for event in events if isinstance(event, PictureProgress) and event.preview is not None
    } == {(16, 16, 3)}


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"size": (17, 16)}, "size"),
        ({"size": (0, 0)}, "size"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"steps": 0}, "steps"),
        ({"steps": 10_000}, "steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": float("inf")}, "guidance_scale"),
        ({"guidance_scale": 1.0, "negative_prompt": "dog"}, "negative_prompt"),
        ({"solver": "magic"}, "solver"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"strength": 0.5}, "strength"),
        ({"strength": 2.0, "image": grey()}, "strength"),
        ({"strength": float("nan"), "image": grey()}, "strength"),
        ({"num_previews": -1}, "num_previews"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(fields: dict[str, Any], param: str) -> None:
    async def work(frontend: PictureFrontend, client: InlineClient) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await frontend.prepare(ask(**fields))
        assert caught.value.param == param and caught.value.message.startswith(f"{param}:")
        stats = (await client.stats())["models"]
        assert all(model["requests"] == 0 for model in stats.values())
        image = fields.get("image")
        assert image is None or image.sizes == []

    run(work)


def test_few_step_models() -> None:
    assert pictures(paint(FEW_STEP, steps=2))[0].pixels.shape == (16, 16, 3)
    for fields, param in (
        ({"steps": 4}, "steps"),
        ({"negative_prompt": "dog"}, "negative_prompt"),
        ({"guidance_scale": 3.0}, "guidance_scale"),
        ({"image": grey()}, "image"),
    ):
        with pytest.raises(UnsupportedParameter) as caught:
            paint(FEW_STEP, **fields)
        assert caught.value.param == param


def test_the_card_is_the_engine_s_and_other_kinds_have_none() -> None:
    class Other:
        async def load(self, model: str) -> ModelInfo:
            return ModelInfo(model=model, kind="llm", source="", max_model_len=1, vocab_size=1, hidden_size=1)

    async def work(frontend: PictureFrontend, client: InlineClient) -> None:
        found = (await frontend.card("fake")).rules
        names = [name for name in PictureRules.__dataclass_fields__ if name != "sigmas"]
        assert [getattr(found, name) for name in names] == [getattr(RULES, name) for name in names]
        with pytest.raises(InvalidRequest, match="does not make pictures") as caught:
            await PictureFrontend(Other()).card("chat")  # type: ignore[arg-type]
        assert caught.value.param == "model"

    run(work)


def test_what_the_model_refuses_later_is_a_failure() -> None:
    for prompt, code in (("unencodable words", "invalid_value"), ("nan", "not_finite"), ("raise", "internal_error")):
        last = paint(prompt=prompt)[-1]
        assert isinstance(last, Failed) and last.error.code == code


def test_what_the_opener_raises_is_passed_on() -> None:
    async def broken(width: int, height: int) -> Pixels:
        raise InvalidRequest("image: damaged", param="image", code="invalid_image")

    with pytest.raises(MotetError, match="damaged"):
        paint(image=broken)


# ------------------------------------------------------------------------------------------------------------ leaving


def test_leaving_ends_the_request_within_a_step() -> None:
    painter = ScriptedPainter()

    async def work(frontend: PictureFrontend, client: InlineClient) -> None:
        stream = frontend.paint(ask(steps=200, n=3))
        await anext(stream)
        await stream.aclose()
        for _ in range(1000):
            stats = (await client.stats())["models"]["fake"]
            if not stats["requests"]:
                break
        assert (stats["requests"], stats["diffusion_running_rows"]) == (0, 0)
        count = len(painter.batches)
        assert count < 200
        await client.stats()
        assert len(painter.batches) == count and client.num_requests == 0

    run(work, painter=painter)


def test_an_abort_is_told() -> None:
    async def work(frontend: PictureFrontend, client: InlineClient) -> None:
        events = []
        async for event in frontend.paint(ask(steps=200, request_id="mine")):
            if not events:
                await client.abort("mine", "deadline")
            events.append(event)
        assert isinstance(events[-1], Aborted) and events[-1].reason == "deadline"

    run(work)

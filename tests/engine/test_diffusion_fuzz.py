"""The picture engine over a real, tiny Flux: whoever joins, leaves or fails, everybody else's picture is the one made alone."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from motet.engine.blobs import from_blob, to_blob
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.diffusion_load import picture_model, start_engine
from motet.engine.painter import Rows
from motet.engine.step_cache import CacheConfig
from motet.engine.types import Aborted, AnyEvent, Done, Failed, ImageRequest, Picture

from ..tiny import tiny_picture
from .scripted_adapter import ends

CPU = torch.device("cpu")
RAISES, NOT_FINITE = 3.75, 3.25  # guidance scales whose rows go wrong
PROMPTS = ("a red apple", "two small cats on the left", "a", "a big rocket on the right on a blue background", "cat")
SOLVERS = ("euler", "dpmpp_2m", "unipc", "lcm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture(tmp_path_factory.mktemp("pictures") / "tiny")


@pytest.fixture(params=[None, CacheConfig(policy="first_block", threshold=0.05)], ids=["whole", "first_block"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[DiffusionEngine]:
    model = picture_model(folder, dtype=torch.float32, devices=(CPU, CPU, CPU))
    one = start_engine("tiny", folder, model, cache=request.param, max_rows=12, max_step_rows=7)
    whole, begin = one.painter.forward, one.painter.begin  # type: ignore[attr-defined]

    def goes_wrong(rows: Rows) -> Rows:
        """A row that raises, or whose picture is not a number."""
        if (rows.guidance == RAISES).any():
            raise RuntimeError("a row that raises")
        bad = (rows.guidance == NOT_FINITE)[:, None, None, None]
        return replace(rows, latents=rows.latents.masked_fill(bad, float("nan")))

    one.painter.forward = lambda rows: whole(goes_wrong(rows))  # type: ignore[method-assign]
    one.painter.begin = lambda rows: begin(goes_wrong(rows))  # type: ignore[attr-defined]
    yield one
    one.close()


def any_request(name: str, rng: random.Random) -> ImageRequest:
    """A request of any kind that can be made; some of them cannot work."""
    fields: dict[str, object] = {"num_steps": rng.choice((1, 2, 3, 5, 9, 12)), "solver": rng.choice(SOLVERS)}
    scale = rng.choice((1.0, 1.0, 2.0, 2.0, 3.5, RAISES, NOT_FINITE))
    if scale > 1 and rng.random() < 0.4:
        fields["negative_prompt"] = rng.choice(PROMPTS)
    if rng.random() < 0.3:
        shade = torch.full((64, 64, 3), rng.randrange(256), dtype=torch.uint8)
        fields |= {"image": to_blob(shade), "strength": rng.choice((0.2, 0.5, 1.0))}
    prompt = "word " * 40 if rng.random() < 0.07 else rng.choice(PROMPTS)
    return ImageRequest(
        request_id=name, model="tiny", prompt=prompt, guidance_scale=scale, seed=rng.randrange(5), n=rng.choice((1, 1, 2)),
        preview_every=rng.choice((0, 0, 2)), priority=rng.choice((0, 0, 1)), **fields,
    )  # type: ignore[arg-type]  # fmt: skip


def take(one: DiffusionEngine, events: list[AnyEvent]) -> None:
    """What a host does in one turn."""
    if one.has_work():
        events += one.step()
    else:
        time.sleep(0.0005)


def finish(one: DiffusionEngine) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    give_up = time.monotonic() + 60
    while one.num_requests() or one.encoder.num_inside or one.decoder.num_inside:
        assert time.monotonic() < give_up
        take(one, events)
    return events


def pictures(events: list[AnyEvent]) -> dict[tuple[str, int], torch.Tensor]:
    return {(e.request_id, e.index): from_blob(e.image) for e in events if isinstance(e, Picture)}


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def storm(one: DiffusionEngine, rng: random.Random, count: int) -> tuple[dict[str, ImageRequest], list[AnyEvent]]:
    """Requests come at any time, some leave before they are done."""
    requests, events = {f"r{at}": any_request(f"r{at}", rng) for at in range(count)}, []
    coming, running = list(requests.values()), set()
    while coming:
        if rng.random() < 0.4:
            request = coming.pop()
            one.submit(request)
            running.add(request.request_id)
        if running and rng.random() < 0.06:
            events += one.abort(running.pop(), "the reader went")
        if rng.random() < 0.1:
            one.update(rng.choice(sorted(requests)), priority=rng.choice((0, 1)))
        take(one, events)
    return requests, events + finish(one)


def test_everybody_gets_the_picture_made_alone(engine: DiffusionEngine) -> None:
    rng = random.Random(1)
    requests, events = storm(engine, rng, 36)
    ended = ends(events)
    assert ended.keys() == requests.keys()
    kinds = {kind: [name for name, end in ended.items() if isinstance(end, kind)] for kind in (Done, Aborted, Failed)}
    assert all(kinds.values()), {kind.__name__: len(names) for kind, names in kinds.items()}
    for name in kinds[Failed]:
        request, end = requests[name], ended[name]
        assert isinstance(end, Failed)
        bad = request.guidance_scale in (RAISES, NOT_FINITE) or request.prompt.startswith("word")
        assert bad, end.error
        if request.prompt.startswith("word"):
            assert (end.error.kind, end.error.param) == ("InvalidRequest", "prompt")
        else:
            assert end.error.kind == "InternalError"
    together = pictures(events)
    for name in kinds[Done]:
        engine.submit(replace_id(requests[name], "alone"))
        alone = pictures(finish(engine))
        for index in range(requests[name].n):
            apart = (together[name, index].int() - alone["alone", index].int()).abs()
            assert apart.max() <= 2 and apart.float().mean() < 0.02, (requests[name], int(apart.max()))


def replace_id(request: ImageRequest, name: str) -> ImageRequest:
    fields = {field: getattr(request, field) for field in request.__struct_fields__}
    return ImageRequest(**(fields | {"request_id": name}))


def test_nothing_is_left_of_anybody(engine: DiffusionEngine) -> None:
    rng = random.Random(2)
    counts = []
    for _ in range(4):
        requests, events = storm(engine, rng, 16)
        assert ends(events).keys() == requests.keys()
        del requests, events
        assert engine.num_requests() == engine.planner.num_rows == engine.planner.num_waiting == 0
        assert not engine._to_encode and not engine._to_decode and not engine.has_work()
        for prompt in PROMPTS:  # all of them known: what the cache of prompts holds is the same each time
            engine.submit(ImageRequest(request_id=prompt, model="tiny", prompt=prompt, num_steps=1))
        finish(engine)
        engine.last_error = None  # it holds the frames of what failed
        engine.painter.denoiser._times.clear()  # type: ignore[attr-defined]  # embedded times: bounded in number, not by who is here
        counts.append(num_tensors())
    assert max(counts[1:]) <= counts[0], counts


def test_same_seed_same_picture_after_a_restart(folder: Path) -> None:
    made = []
    for _ in range(2):
        model = picture_model(folder, dtype=torch.float32, devices=(CPU, CPU, CPU))
        one = start_engine("tiny", folder, model, max_step_rows=2)
        for solver in SOLVERS:
            one.submit(
                ImageRequest(request_id=solver, model="tiny", prompt="a red apple", solver=solver, seed=9, num_steps=5)
            )
            made.append(pictures(finish(one))[solver, 0])
        one.close()
    for before, after in zip(made[:4], made[4:]):
        assert torch.equal(before, after)
    assert len({picture.numpy().tobytes() for picture in made}) == 4  # and another one by every solver

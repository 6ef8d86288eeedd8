"""The three stages and the batch that changes between steps, over a scripted painter."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from motet.engine.client import InlineClient
from motet.engine.config import HostConfig
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.errors import DuplicateRequest, InvalidRequest, Overloaded
from motet.engine.frames import Events, Submit, from_host_decoder, pack, to_host_decoder
from motet.engine.types import (
    Aborted,
    AnyEvent,
    AudioRequest,
    Blob,
    Denoising,
    Done,
    Failed,
    ImageRequest,
    Picture,
)

from .scripted_adapter import ScriptedPainter, ends, engine, request, run, run_until


@pytest.fixture
def made() -> Iterator[list[DiffusionEngine]]:
    """Engines to close."""
    engines: list[DiffusionEngine] = []
    yield engines
    for one in engines:
        one.close()


def new(made: list[DiffusionEngine], painter: ScriptedPainter | None = None, **settings: object) -> DiffusionEngine:
    made.append(engine(painter, **settings))
    return made[-1]


def watched(one: DiffusionEngine) -> dict[tuple[str, int], torch.Tensor]:
    """The latents that are handed to the decoder, as they come."""
    latents: dict[tuple[str, int], torch.Tensor] = {}
    offer = one._offer_decoding

    def look(what: Any, tensor: torch.Tensor) -> Any:
        if what.step is None:
            latents[what.making.id, what.index] = tensor.clone()
        return offer(what, tensor)

    one._offer_decoding = look  # type: ignore[method-assign]
    return latents


def pictures(events: list[AnyEvent], name: str) -> list[Picture]:
    return [event for event in events if isinstance(event, Picture) and event.request_id == name]


def empty(one: DiffusionEngine) -> None:
    """Nothing is left of any request."""
    assert one.num_requests() == one.planner.num_rows == one.planner.num_waiting == 0
    assert not one._to_decode and not one._to_encode


MIXED = [
    request("a", "a cat", seed=1, num_steps=3),
    request("b", "one small red apple on a blue background", seed=2, num_steps=9, guidance_scale=7.5),
    request("c", "car", seed=3, num_steps=5, guidance_scale=0.0),
    request("d", "two rockets on the left", seed=4, num_steps=6, negative_prompt="blur and noise", solver="ancestral"),
    request("e", "a cat", seed=5, num_steps=4, width=32, height=16, n=2),
]


def test_together_is_as_alone(made: list[DiffusionEngine]) -> None:
    together = new(made)
    latents = watched(together)
    events = run(together, *MIXED)
    assert {name: type(end) for name, end in ends(events).items()} == dict.fromkeys("abcde", Done)
    assert max(len(batch) for batch in together.painter.batches) >= 7  # type: ignore[attr-defined]
    for one in MIXED:
        alone = new(made)
        mine = watched(alone)
        run(alone, one)
        for (name, index), tensor in mine.items():
            torch.testing.assert_close(latents[name, index], tensor, rtol=0, atol=1e-5)
    assert together.counters.num_steps < sum(one.num_steps for one in MIXED)
    empty(together)


def test_same_seed_same_picture_and_n_is_consecutive_seeds(made: list[DiffusionEngine]) -> None:
    one = new(made)
    latents = watched(one)
    events = run(one, request("many", seed=7, n=3), request("third", seed=9), request("other", seed=11))
    assert [p.seed for p in sorted(pictures(events, "many"), key=lambda p: p.index)] == [7, 8, 9]
    torch.testing.assert_close(latents["many", 2], latents["third", 0], rtol=0, atol=1e-5)
    assert not torch.allclose(latents["many", 0], latents["many", 1])
    assert all(p.image.shape == (16, 16, 3) and p.image.dtype == "uint8" for p in pictures(events, "many"))


def test_a_late_joiner_does_not_wait_for_the_batch(made: list[DiffusionEngine]) -> None:
    one = new(made)
    one.submit(request("long", num_steps=100))
    events = run_until(one, lambda _: one.counters.num_steps >= 5, [])
    joined_at = one.counters.num_steps
    one.submit(request("late", num_steps=4, seed=3))
    run_until(one, lambda events: any(e.request_id == "late" and isinstance(e, Denoising) for e in events), events)
    first = one.counters.num_steps
    run_until(one, lambda events: sum(isinstance(e, Denoising) and e.request_id == "late" for e in events) == 4, events)
    assert one.counters.num_steps - first == 3 and joined_at < first  # a step of its own in each step of the batch
    run_until(one, lambda _: one.num_requests() == 0, events)
    assert set(ends(events)) == {"long", "late"}


def test_no_row_is_computed_after_an_abort(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    one = new(made, painter)
    one.submit(request("gone", "unwanted thing", num_steps=50))
    one.submit(request("stays", "car", num_steps=6))
    events = run_until(one, lambda _: any("unwanted thing" in batch for batch in painter.batches), [])
    (end,) = one.abort("gone", "client")
    assert isinstance(end, Aborted) and end.reason == "client"
    seen = len(painter.batches)
    events += [end]
    run_until(one, lambda _: one.num_requests() == 0, events)
    assert not any("unwanted thing" in batch for batch in painter.batches[seen:])
    assert one.abort("gone", "client") == [] and one.abort("never", "client") == []
    assert isinstance(ends(events)["stays"], Done)
    empty(one)


@pytest.mark.parametrize("word", ["nan", "raise", "unencodable", "undecodable"])
def test_a_bad_request_fails_alone(made: list[DiffusionEngine], word: str) -> None:
    one = new(made)
    latents = watched(one)
    good = [request("a", "a cat", seed=1, num_steps=5), request("b", "car", seed=2, num_steps=7)]
    events = run(one, good[0], request("bad", f"a {word} thing", n=2, guidance_scale=1.0), good[1])
    found = ends(events)
    assert isinstance(found["bad"], Failed) and isinstance(found["a"], Done) and isinstance(found["b"], Done)
    alone = new(made)
    mine = watched(alone)
    run(alone, *good)
    for key, tensor in mine.items():
        torch.testing.assert_close(latents[key], tensor, rtol=0, atol=1e-5)
    empty(one)
    assert isinstance(ends(run(one, request("next")))["next"], Done)


def test_a_picture_to_begin_from(made: list[DiffusionEngine]) -> None:
    one = new(made)
    painter: Any = one.painter
    latents = watched(one)
    image = Blob(dtype="uint8", shape=(16, 16, 3), data=bytes(range(256)) * 3)
    run(one, request("plain", num_steps=10))
    steps = {}
    for strength in (0.01, 0.3, 1.0):
        before = len(painter.batches)
        events = run(one, request(f"s{strength}", num_steps=10, image=image, strength=strength))
        steps[strength] = len(painter.batches) - before
        told = [event for event in events if isinstance(event, Denoising)]
        assert [event.step for event in told] == list(range(1, steps[strength] + 1))
        assert {event.num_steps for event in told} == {steps[strength]}
    assert steps == {0.01: 1, 0.3: 3, 1.0: 10}
    torch.testing.assert_close(latents["s1.0", 0], latents["plain", 0])
    begun = painter.encode_image(torch.tensor(list(image.data), dtype=torch.uint8).reshape(16, 16, 3))
    near = [(latents[f"s{s}", 0] - begun).abs().mean() for s in (0.01, 0.3, 1.0)]
    assert near[0] < near[1] < near[2]


def test_previews_come_before_the_picture(made: list[DiffusionEngine]) -> None:
    one = new(made)
    one.submit(request("a", num_steps=12, preview_every=3))
    events: list[AnyEvent] = []
    for _ in range(12):  # the decoder gets its time after each step, so that no preview is left out
        run_until(one, lambda events, want=one.counters.num_steps + 1: one.counters.num_steps >= want, events)  # type: ignore[misc]
        run_until(one, lambda events: one.decoder.num_inside == 0 or one.num_requests() == 0, _no_denoise(one, events))
    run_until(one, lambda _: one.num_requests() == 0, events)
    previews = [event for event in events if isinstance(event, Denoising) and event.preview is not None]
    assert [event.step for event in previews] == [3, 6, 9]
    assert all(event.preview is not None and event.preview.shape == (16, 16, 3) for event in previews)
    assert isinstance(events[-2], Picture) and isinstance(events[-1], Done)
    assert not [e for e in run(one, request("b", num_steps=4)) if isinstance(e, Denoising) and e.preview is not None]


def _no_denoise(one: DiffusionEngine, events: list[AnyEvent]) -> list[AnyEvent]:
    """Let the decoder finish what it is at."""
    pause = threading.Event()
    for _ in range(2000):
        if one.decoder.num_inside == 0 or one.decoder.has_finished:
            break
        pause.wait(0.001)
    for job in one.decoder.take():
        events += one._decoded(job)
    return events


def test_stages_overlap(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    painter.decode_gate = threading.Event()
    one = new(made, painter)
    one.submit(request("first", num_steps=2))
    events = run_until(one, lambda _: "decode begins" in painter.log, [])
    one.submit(request("second", "another picture", num_steps=3))
    run_until(one, lambda _: one.counters.num_steps >= 4, events)  # while the decoder is at the first one
    at = painter.log.index("decode begins")
    assert painter.log[at:].count("denoise") >= 2 and "encode ends" in painter.log[at:]
    assert "decode ends" not in painter.log
    painter.decode_gate.set()
    painter.encode_gate = threading.Event()
    one.submit(request("third", "a third picture"))
    run_until(one, lambda _: painter.log.count("encode begins") == 3, events)
    one.submit(
        request("fourth", "a red apple", num_steps=5)
    )  # its prompt is known, but the encoder is busy: it waits behind
    run_until(one, lambda events: any(e.request_id == "second" and isinstance(e, Done) for e in events), events)
    assert (
        painter.log.count("encode ends") == 2
    )  # the second was denoised and decoded while the third was being encoded
    painter.encode_gate.set()
    run_until(one, lambda _: one.num_requests() == 0, events)
    assert {type(end) for end in ends(events).values()} == {Done}


def test_queues_are_bounded(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    painter.decode_gate = threading.Event()
    one = new(made, painter, max_requests=12, stage_bound=2, max_step_cost=4.0)  # two guided pictures a step
    for index in range(12):
        one.submit(request(f"r{index}", num_steps=1, n=2))
    with pytest.raises(Overloaded) as refused:
        one.submit(request("late"))
    assert refused.value.retry_after_s
    # All are encoded by then: while the encoder is at something, "no work" may be a moment's.
    full = lambda _: one.decoder.num_inside == 2 and not one.encoder.num_inside and not one.has_work()  # noqa: E731
    events = run_until(one, full, [])
    steps = one.counters.num_steps
    assert one.step() == [] and one.counters.num_steps == steps  # blocked by the decoder alone
    assert one.planner.num_running + one.planner.num_waiting > 0 and 0 < len(one._to_decode) <= 2
    painter.decode_gate.set()
    run_until(one, lambda _: one.num_requests() == 0, events)
    assert len(ends(events)) == 12
    empty(one)


def test_rows_are_bounded(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    one = new(made, painter, max_step_cost=4.0)
    run(one, *[request(f"r{index}", num_steps=3, seed=index, guidance_scale=0.0) for index in range(11)])
    assert max(len(batch) for batch in painter.batches) <= 4


def test_protected_steps_take_a_pass_of_their_own(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    exact: list[bool] = []
    passes: list[tuple[bool, int]] = []
    forward = painter.forward

    def counted(rows: Any) -> torch.Tensor:
        passes.append((exact[-1], len(rows)))
        return forward(rows) + 0.01 * exact[-1]

    painter.forward = counted  # type: ignore[method-assign]
    painter.protect = exact.append  # type: ignore[attr-defined]
    one = new(made, painter, protected_steps=2)
    latents = watched(one)
    asked = [request("long", num_steps=9, guidance_scale=0.0), request("short", num_steps=5, guidance_scale=0.0)]
    run(one, *asked)
    assert sum(rows for is_exact, rows in passes if is_exact) == 8  # two first and two last steps of each
    assert sum(rows for is_exact, rows in passes if not is_exact) == 5 + 1
    together, passes[:] = dict(latents), []
    for each in asked:
        run(one, each)
    for name, tensor in together.items():
        torch.testing.assert_close(latents[name], tensor, rtol=0, atol=1e-5)


def test_little_slack_takes_a_smaller_batch(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    one = new(made, painter)
    for index in range(4):
        one.submit(request(f"r{index}", num_steps=20, guidance_scale=0.0))
    events = run_until(one, lambda _: any(len(batch) == 4 for batch in painter.batches), [])
    one._cost_s = 1.0
    events += one.step(slack_s=2.5)
    assert len(painter.batches[-1]) == 2
    one._cost_s = 1.0
    events += one.step(slack_s=0.0)
    assert len(painter.batches[-1]) == 1
    assert one.next_deadline() is None
    run_until(one, lambda _: one.num_requests() == 0, events)


def test_prompts_are_remembered_within_their_bytes(made: list[DiffusionEngine]) -> None:
    painter = ScriptedPainter()
    one = new(made, painter, prompt_cache_bytes=3 * 4 * 8)
    for name, prompt in enumerate(["a", "b", "a", "c d e f", "b"]):
        run(one, request(str(name), prompt, guidance_scale=0.0))
    assert painter.encoded == ["a", "b", "c d e f"] and one.prompts.num_bytes == 2 * 4 * 8
    assert one.stats()["prompt_cache_hits"] == 2 and one.stats()["prompt_cache_queries"] == 5
    run(one, request("x", "x", guidance_scale=0.0), request("y", "y", guidance_scale=0.0))
    run(one, request("again", "a", guidance_scale=0.0))
    assert painter.encoded[-1] == "a" and one.prompts.num_bytes <= 3 * 4 * 8


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_each_request_ends_once(made: list[DiffusionEngine], seed: int) -> None:
    rng = random.Random(seed)
    one = new(made, max_step_cost=8.0, stage_bound=2, max_requests=200)
    events: list[AnyEvent] = []
    words = ["cat", "car", "apple", "nan", "raise", "unencodable", "undecodable"]
    names = [f"r{index}" for index in range(40)]
    waiting = list(names)
    assert one.abort("r0", "client") == []  # before it was submitted
    for _ in range(20_000):
        if waiting and rng.random() < 0.3:
            width = rng.choice([16, 32])
            one.submit(
                request(
                    waiting.pop(0),
                    " ".join(rng.choices(words, weights=[9, 9, 9, 1, 1, 1, 1], k=rng.randint(1, 5))),
                    num_steps=rng.randint(1, 6),
                    n=rng.randint(1, 3),
                    width=width,
                    height=16,
                    preview_every=rng.randint(0, 2),
                    priority=rng.randint(0, 1),
                )
            )
        if rng.random() < 0.1:
            events += one.abort(rng.choice(list(one._requests) or names), "client")
        if one.has_work():
            events += one.step(rng.choice([None, 0.0, 0.01]))
        elif not waiting and one.num_requests() == 0:
            break
        else:
            threading.Event().wait(0.0005)
    found = ends(events)
    assert set(found) == set(names)
    assert {type(end) for end in found.values()} == {Done, Failed, Aborted}
    for event in events:
        if isinstance(event, Done):
            assert pictures(events, event.request_id)
    empty(one)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": " "}, "prompt"),
        ({"prompt": "x" * 10_000}, "prompt"),
        ({"width": 17, "height": 16}, "size"),
        ({"num_steps": 10_000}, "num_steps"),
        ({"num_steps": -1}, "num_steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"solver": "magic"}, "solver"),
        ({"preview_every": -1}, "preview_every"),
        ({"negative_prompt": "blur", "guidance_scale": 1.0}, "negative_prompt"),
        ({"image": Blob(dtype="uint8", shape=(8, 8, 3), data=b"\0" * 192)}, "image"),
        ({"image": Blob(dtype="uint8", shape=(16, 16, 3), data=b"\0" * 10)}, "image"),
        ({"image": Blob(dtype="uint8", shape=(16, 16, 3), data=b"\0" * 768), "strength": 0.0}, "strength"),
    ],
)
def test_bad_input_names_its_field(made: list[DiffusionEngine], fields: dict[str, Any], param: str) -> None:
    one = new(made)
    with pytest.raises(InvalidRequest) as refused:
        one.submit(ImageRequest(**({"request_id": "a", "model": "fake", "prompt": "a cat"} | fields)))
    assert refused.value.param == param and one.num_requests() == 0


def test_other_requests_and_second_ids_are_refused(made: list[DiffusionEngine]) -> None:
    one = new(made)
    with pytest.raises(InvalidRequest):
        one.submit(AudioRequest(request_id="a", model="fake"))
    one.submit(request("a"))
    with pytest.raises(DuplicateRequest):
        one.submit(request("a"))
    with pytest.raises(InvalidRequest):
        one.append("a", [1])


def test_who_watches_is_told_of_every_job_and_step(made: list[DiffusionEngine]) -> None:
    one = new(made)
    run(one, request("a"))
    told: list[tuple[str, float, float]] = []
    one.watch(lambda *work: told.append(work))
    run(one, request("b", num_steps=3))
    one.watch(None)
    run(one, request("c"))
    told.sort(key=lambda work: work[1])
    assert [stage for stage, _, _ in told] == ["encode", "denoise", "denoise", "denoise", "decode"]
    assert all(began <= ended for _, began, ended in told)
    assert all(before[2] <= after[1] + 1e-4 for before, after in zip(told, told[1:]))


def test_the_end_of_a_stages_job_is_seen_soon(made: list[DiffusionEngine]) -> None:
    now = [10.0]
    painter = ScriptedPainter()
    painter.encode_gate = threading.Event()
    one = new(made, painter, clock=lambda: now[0])
    assert one.next_timer() is None
    one.submit(request("a"))
    one.step()
    waits = []
    for age in (0.0, 0.01, 0.02, 1.0):
        now[0] = 10.0 + age
        waits.append((one.next_timer() or 0.0) - now[0])
    assert waits == pytest.approx([0.0003, 0.001, 0.002, 0.004])  # a tenth of its age, in bounds
    painter.encode_gate.set()


def test_through_a_host_and_over_the_wire() -> None:
    async def ask() -> list[AnyEvent]:
        client = InlineClient(HostConfig(), build=lambda name, config, report: engine())
        try:
            told = [event async for event in client.submit(request("a", n=2, preview_every=1))]
            assert (await client.stats())["models"]["fake"]["device_seconds"] > 0
            return told
        finally:
            await client.close()

    events = asyncio.run(ask())
    assert isinstance(events[-1], Done) and len(pictures(events, "a")) == 2
    assert from_host_decoder.decode(pack(Events(events))[4:]) == Events(events)
    image = Blob(dtype="uint8", shape=(1, 1, 3), data=b"abc")
    submit = Submit(request("a", image=image, guidance_scale=2.0))
    assert to_host_decoder.decode(pack(submit)[4:]) == submit

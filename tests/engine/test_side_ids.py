"""Several codebooks per position on the paged engine: however a request is served, all its codes are the same."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
import torch

from motet.engine.cache.hashing import extend_chain
from motet.engine.client import Mailbox
from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.engine.frontend.text import TextFrontend
from motet.engine.llm_engine import LLMEngine
from motet.engine.speculation.ngram import NgramProposer
from motet.engine.types import Done, Failed, Request, SideIds, StepMask, StepPlan, Tokens
from motet.kernels.sampling import SamplingRows, sample

from .. import tiny
from ..models.csm_models import END, FIRST_TEXT, NUM_CODEBOOKS, NUM_CODES, csm, prompt, reference

Frames = list[list[int]]


def engine(**config: Any) -> LLMEngine:
    return tiny.engine(csm(), **config)


def several() -> list[Request]:
    return [
        tiny.request(prompt(3 + 9 * seed, seed), max_tokens=14, temperature=[0.0, 0.9, 1.3][seed % 3], seed=seed,
                     top_k=[0, 12][seed % 2])
        for seed in range(5)
    ]  # fmt: skip


def frames(events: list[Any]) -> Frames:
    """All codes of one answer, codebook 0 first."""
    assert isinstance(events[-1], Done), events[-1]
    found = []
    for event in events:
        if isinstance(event, Tokens):
            assert event.side_ids is not None
            found += [[first, *rest] for first, rest in zip(event.token_ids, event.side_ids, strict=True)]
    return found


def answers(running: LLMEngine, requests: list[Request]) -> list[Frames]:
    by_id = tiny.run(running, requests)
    return [frames(by_id[item.request_id]) for item in requests]


@pytest.fixture(scope="module")
def plain() -> list[Frames]:
    return answers(engine(), several())


def test_greedy_equals_transformers() -> None:
    requests = [tiny.request(prompt(5 + 4 * seed, seed), max_tokens=20) for seed in range(3)]
    for item, got in zip(requests, answers(engine(), requests), strict=True):
        ids = torch.tensor([item.prompt]) - FIRST_TEXT
        with torch.no_grad():
            expected = reference().generate(
                ids, max_new_tokens=20, do_sample=False, depth_decoder_do_sample=False, output_audio=False
            )
        assert got == expected[0].tolist()
        assert len({tuple(frame) for frame in got}) > 5


def test_sampled_equals_a_plain_loop() -> None:
    """Another implementation's networks, one request, no cache at all, with the noise of (seed, position, codebook)."""
    item = tiny.request(prompt(7, 5), max_tokens=10, temperature=1.1, top_k=15, seed=77)
    (got,) = answers(engine(), [item, *several()])[:1]
    model = reference()

    def draw(logits: torch.Tensor, position: int, head: int) -> int:
        one = torch.ones(1)
        rows = SamplingRows(
            temperature=one * 1.1, top_k=torch.tensor([15]), top_p=one, min_p=one * 0, noise_seed=torch.tensor([77]),
            noise_position=torch.tensor([position]), head=head, any_top_p=False, any_min_p=False,
        )  # fmt: skip
        return int(sample(logits[None].clone(), rows))

    embeds = model.embed_text_tokens(torch.tensor([item.prompt]) - FIRST_TEXT)
    expected: Frames = []
    with torch.no_grad():
        for position in range(7, 17):
            hidden = model.backbone_model(inputs_embeds=embeds).last_hidden_state[:, -1]
            codes = [draw(model.lm_head(hidden)[0], position, 0)]
            for head in range(1, NUM_CODEBOOKS):
                ids = torch.tensor([[0, *codes]])
                logits = model.depth_decoder(input_ids=ids, backbone_last_hidden_state=hidden).logits
                codes.append(draw(logits[0, -1], position, head))
            expected.append(codes)
            embeds = torch.cat((embeds, model.backbone_model.embed_tokens(torch.tensor([[codes]]))), dim=1)
    assert got == expected


def test_batched_equals_alone(plain: list[Frames]) -> None:
    assert [answers(engine(), [item])[0] for item in several()] == plain
    assert len({tuple(frame) for answer in plain for frame in answer}) > 30


@pytest.mark.parametrize("config", [{"max_num_batched_tokens": 5}, {"depth": 1}, {"enable_prefix_caching": False}])
def test_another_way_of_serving_gives_the_same(config: dict[str, Any], plain: list[Frames]) -> None:
    running = engine(**config)
    assert answers(running, several()) == plain
    assert tiny.all_free(running)
    running.close()


def test_preempted_equals_not(plain: list[Frames]) -> None:
    small = engine(num_blocks=24)
    assert answers(small, several()) == plain
    assert small.scheduler.counters.num_preemptions > 0
    assert any(new.side for plan in tiny.plans(small) for new in plan.new)  # some came back with codes of their own
    assert tiny.all_free(small)


def test_recorded_plans_replayed_give_the_same_codes() -> None:
    recorded = engine(num_blocks=24)
    answers(recorded, several())
    stream = [msgspec.msgpack.encode(plan) for plan in tiny.plans(recorded)]
    expected = [[(r.slot, r.token_ids, r.side_ids) for r in result.results] for _, result in recorded.flight_recorder]
    fresh = engine(num_blocks=24).executor
    replayed = [fresh.launch(msgspec.msgpack.decode(data, type=StepPlan)).result() for data in stream]
    assert [[(r.slot, r.token_ids, r.side_ids) for r in result.results] for result in replayed] == expected


def test_a_prompt_of_codes_is_found_in_the_cache_by_all_of_them() -> None:
    """A second turn continues the first one's frames; frames that differ in codebook 3 alone are other frames."""
    first = several()[4]
    running = engine()
    (spoken,) = answers(running, [first])

    def turn(spoken: Frames) -> Request:
        side = [SideIds(start=len(first.prompt), ids=[frame[1:] for frame in spoken])]
        ids = [*first.prompt, *(frame[0] for frame in spoken), *prompt(4, 9)]
        return tiny.request(ids, side=side, max_tokens=8)

    uncached = answers(engine(enable_prefix_caching=False), [turn(spoken)])
    events = tiny.run(running, [asked := turn(spoken)])[asked.request_id]
    assert frames(events) == uncached[0]
    assert events[-1].usage.num_cached_tokens >= len(first.prompt) + len(spoken) - 4
    other = [[*frame[:-1], (frame[-1] + 1) % NUM_CODES] for frame in spoken]
    expected = answers(engine(enable_prefix_caching=False), [turn(other)])
    events = tiny.run(running, [asked := turn(other)])[asked.request_id]
    assert frames(events) == expected[0] != uncached[0]
    assert events[-1].usage.num_cached_tokens == len(first.prompt) // 4 * 4


def test_codes_that_were_not_given_are_zeros_whoever_had_the_slot() -> None:
    ids = [*prompt(4), 3, 4, 5, *prompt(3)]
    zeros = [SideIds(start=4, ids=[[0] * (NUM_CODEBOOKS - 1)] * 3)]
    expected = answers(engine(), [tiny.request(ids, side=zeros)])
    used = engine(max_num_seqs=1, enable_prefix_caching=False)
    answers(used, several())
    assert answers(used, [tiny.request(ids)]) == expected


def test_a_frame_of_end_codes_ends_the_answer() -> None:
    zeros = StepMask(steps=(((3, 4),), ((5, 9),), ((0, 1),)))  # codebook 0 is the end code at the third position
    item = tiny.request(prompt(6), allowed=zeros, max_tokens=12, ignore_eos=False)
    running = engine()
    model = running.executor.runner.model
    events = tiny.run(running, [item])[item.request_id]
    assert len(frames(events)) == 12  # the others did not say so: a code like any other
    for head in model.depth.heads:  # now the depth decoder says the end code whatever it reads
        head.tensors["weight"].zero_()
    events = tiny.run(running, [msgspec.structs.replace(item, request_id="again")])["again"]
    done = events[-1]
    assert (done.finish_reason, done.stop_token, len(frames(events))) == ("stop", END, 2)


def test_nan_of_the_depth_decoder_fails_its_requests() -> None:
    running = engine(enable_prefix_caching=False)
    running.executor.runner.model.depth.heads[1].tensors["weight"].fill_(float("nan"))
    (events,) = tiny.run(running, [tiny.request(prompt(5))]).values()
    assert isinstance(events[-1], Failed) and events[-1].error.code == "nan_logits"
    assert tiny.all_free(running)


def test_what_such_a_model_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="multi_codebook with speculation is refused"):
        engine(speculation="ngram")
    with pytest.raises(ModelLoadError, match="guess every codebook"):
        tiny.engine(csm(), proposer=NgramProposer(num_drafts=2))
    running = engine()
    assert running.info.num_codebooks == NUM_CODEBOOKS and running.info.eos_token_ids == (END,)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {FIRST_TEXT: 1.0}}, "logit_bias"),
        ({"side": [SideIds(start=0, ids=[[1, 2]])]}, "expected 3 ids"),
        ({"side": [SideIds(start=0, ids=[[1, 2, NUM_CODES]])]}, "expected 3 ids"),
        ({"side": [SideIds(start=5, ids=[[1, 2, 3]] * 3)]}, "within the prompt"),
        ({"side": [SideIds(start=2, ids=[[1, 2, 3]]), SideIds(start=2, ids=[[1, 2, 3]])]}, "in order"),
    ]
    for fields, words in bad:
        with pytest.raises(InvalidRequest, match=words):
            running.submit(tiny.request(prompt(6), **fields))
    with pytest.raises(InvalidRequest, match="one codebook"):
        tiny.engine().submit(tiny.request(tiny.prompt(6), side=[SideIds(start=0, ids=[[1]])]))


def test_it_is_not_asked_for_text() -> None:
    with pytest.raises(InvalidRequest, match="codes of audio, not in text"):
        asyncio.run(TextFrontend(None).tokenizer(engine().info))  # type: ignore[arg-type]


def test_a_model_of_one_codebook_has_no_table() -> None:
    running = tiny.engine()
    events = tiny.run(running, [item := tiny.request(tiny.prompt(5))])[item.request_id]
    assert all(event.side_ids is None for event in events[:-1])
    assert running.executor.runner._side_table is None


def test_keys_of_blocks_tell_side_ids_apart() -> None:
    ids, seen = list(range(8)), set()
    for spans in ([], [SideIds(start=1, ids=[[1, 2]])], [SideIds(start=2, ids=[[1, 2]])], [SideIds(start=1, ids=[[2, 1]])],
                  [SideIds(start=1, ids=[[1], [2]])], [SideIds(start=1, ids=[[1]]), SideIds(start=2, ids=[[2]])]):  # fmt: skip
        keys: list[bytes] = []
        extend_chain(keys, b"root", ids, 4, (), spans)
        seen.add(keys[0])
    assert len(seen) == 6
    late: list[list[bytes]] = [[], []]
    for keys, start in zip(late, (4, 5), strict=True):
        extend_chain(keys, b"root", ids, 4, (), [SideIds(start=start, ids=[[1, 2]])])
    assert late[0][0] == late[1][0] and late[0][1] != late[1][1]


def test_merged_events_keep_codes_with_their_positions() -> None:
    async def merged() -> Tokens:
        box = Mailbox()
        for seq, first in enumerate(itertools.count(5)):
            box.put(Tokens(request_id="r", seq=seq, token_ids=[first], side_ids=[[first + 1]]))
            if seq == 2:
                break
        (event,) = await box.take()
        assert isinstance(event, Tokens)
        return event

    event = asyncio.run(merged())
    assert event.token_ids == [5, 6, 7] and event.side_ids == [[6], [7], [8]]

"""Drafts change speed only: chains and trees through verify and copy_slots give the plain engine's tokens."""

from __future__ import annotations

import pytest

from motet.engine.speculation.ngram import NgramProposer
from motet.engine.speculation.proposer import Drafts, View
from motet.engine.types import StepMask

from .. import tiny


class Oracle:
    """Drafts a tree around the known answer, so that some paths are accepted, at known depths, off the first branch."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.accepted: list[int] = []

    def propose(self, view: View, aux_hidden: object | None) -> Drafts:
        done = len(view.token_ids) - view.num_prompt
        right = self.answer[done : done + 3]
        if len(right) < 3 or view.room < 7:
            return Drafts()
        wrong = [(token + 1) % tiny.VOCAB for token in right]
        # Root children: wrong, right. The right one has children wrong, right; that one again wrong, (right two times in three).
        last = right[2] if done % 3 else wrong[2]
        return Drafts(
            ids=[wrong[0], right[0], wrong[1], right[1], wrong[2], last, wrong[0]], parents=[-1, -1, 1, 1, 3, 3, 0]
        )

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        self.accepted.append(num_accepted)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.95}])
def test_ngram_chain_equals_plain(params: dict[str, float]) -> None:
    repeated = tiny.prompt(9) * 4
    requests = [
        tiny.request(repeated, max_tokens=48, **params),
        tiny.request(tiny.prompt(7, 3) * 3, max_tokens=40, **params),
    ]
    plain = tiny.answers(tiny.engine(), requests)
    drafting = tiny.engine(proposer=NgramProposer(num_drafts=4, min_n=1))
    assert tiny.answers(drafting, requests) == plain
    counters = drafting.scheduler.counters
    assert counters.num_drafted > 0
    if not params:  # greedy text of a tiny model loops, so n-grams hit
        assert counters.num_accepted > 0
    assert tiny.all_free(drafting)


@pytest.mark.parametrize("path", [tiny.llama, tiny.windowed])
def test_draft_tree_equals_plain(path) -> None:  # type: ignore[no-untyped-def]
    item = tiny.request(tiny.prompt(11), max_tokens=40)
    plain = tiny.one(tiny.engine(path()), item)
    oracle = Oracle(plain)
    drafting = tiny.engine(path(), proposer=oracle)
    assert tiny.one(drafting, item) == plain
    assert {2, 3} <= set(oracle.accepted)
    assert len(tiny.plans(drafting)) < 25  # 40 tokens in far fewer steps
    assert tiny.all_free(drafting)


def test_processors_apply_to_every_verify_row() -> None:
    """Penalties count the drafts on the path; min_tokens and masks hold inside a verified window."""
    item = tiny.request(
        tiny.prompt(11), max_tokens=32, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        penalty_window=16, ignore_eos=False, min_tokens=20,
        allowed=StepMask(steps=(((0, 64),), ((32, 128),), ((0, 128),)), cycle=True),
    )  # fmt: skip
    plain = tiny.one(tiny.engine(), item)
    assert tiny.one(tiny.engine(proposer=Oracle(plain)), item) == plain
    assert tiny.one(tiny.engine(proposer=NgramProposer(num_drafts=3, min_n=1)), item) == plain


def test_logprobs_of_accepted_tokens_come_from_their_rows() -> None:
    item = tiny.request(tiny.prompt(11), max_tokens=24, logprobs=3)
    plain = [row for event in tiny.run(tiny.engine(), [item])[item.request_id][:-1] for row in event.logprobs]
    answer = [row.token_id for row in plain]
    drafted = tiny.run(tiny.engine(proposer=Oracle(answer)), [item])[item.request_id]
    rows = [row for event in drafted[:-1] for row in event.logprobs]
    assert [row.token_id for row in rows] == answer
    assert [row.top_ids for row in rows] == [row.top_ids for row in plain]
    assert [row.logprob for row in rows] == pytest.approx([row.logprob for row in plain], abs=1e-4)


def test_drafts_survive_preemption() -> None:
    requests = [tiny.request(tiny.prompt(9, seed) * 2, max_tokens=40) for seed in range(4)]
    plain = [tiny.one(tiny.engine(), item) for item in requests]
    small = tiny.engine(proposer=NgramProposer(num_drafts=4, min_n=1), num_blocks=30)
    assert tiny.answers(small, requests) == plain
    assert small.scheduler.counters.num_preemptions > 0

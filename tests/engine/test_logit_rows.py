"""Rows that are edited together are edited as one by one, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.logit_rows import SlotState, edit_logits, edit_together
from motet.engine.types import SamplingParams, StepMask

VOCAB, LENGTH = 40, 30
RANGES = st.lists(
    st.tuples(st.integers(0, VOCAB), st.integers(0, VOCAB)).map(lambda pair: (min(pair), max(pair))), max_size=4
)


def state(params: SamplingParams, num_prompt: int) -> SlotState:
    return SlotState(
        params=params, seed=0, num_prompt=num_prompt, pool=False, pooling="last", embeddings=[], num_blocks=[],
        stop_ids=params.stop_token_ids,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_together_is_as_one_by_one(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    num_rows = data.draw(st.integers(1, 6))
    tokens = torch.randint(VOCAB, (8, LENGTH), generator=generator)
    logits = torch.randn(num_rows + 1, VOCAB, generator=generator) * 4  # the last row is nobody's
    states, slots, known = [], [], []
    for _ in range(num_rows):
        masks = data.draw(st.one_of(st.none(), st.lists(RANGES, min_size=1, max_size=3)))
        params = SamplingParams(
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.1, 0.5])),
            penalty_window=data.draw(st.sampled_from([0, 1, 5, 100])),
            allowed=None if masks is None else StepMask(steps=tuple(map(tuple, masks)), cycle=data.draw(st.booleans())),
            min_tokens=0 if masks is None else data.draw(st.integers(0, 20)),
            stop_token_ids=tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
        )
        known.append(data.draw(st.integers(1, LENGTH)))
        states.append(state(params, data.draw(st.integers(1, known[-1]))))
        slots.append(data.draw(st.integers(0, 7)))
    expected = logits.clone()
    for row, (one, slot, count) in enumerate(zip(states, slots, known, strict=True)):
        edit_logits(expected[row], one, tokens[slot, :count].tolist())
    rows = [row for row, one in enumerate(states) if one.joins]
    assert all(one.joins or not one.edits for one in states)
    pick = [(states[row], slots[row], known[row]) for row in rows]
    edit_together(
        logits, rows, [one for one, _, _ in pick], slots=[slot for _, slot, _ in pick],
        known=[count for _, _, count in pick], tokens=tokens,
    )  # fmt: skip
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=1.0),
        SamplingParams(frequency_penalty=1.0, repetition_penalty=1.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(min_tokens=2, stop_token_ids=(1,)),
        SamplingParams(allowed=StepMask(steps=(((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),))),
    ],
    ids=str,
)
def test_the_others_are_edited_alone(params: SamplingParams) -> None:
    one = state(params, 1)
    assert one.edits and not one.joins

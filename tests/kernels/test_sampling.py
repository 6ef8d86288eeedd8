"""Sampling: the drawn distribution, filters against a naive reference, noise that knows no batch, edits of logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from motet.kernels.sampling import (
    SamplingRows,
    apply_allowed,
    apply_bias,
    apply_penalties,
    apply_ranges,
    apply_repetition,
    gumbel,
    noise_keys,
    sample,
    sample_reference,
    token_logprobs,
)


def rows_of(n: int, **settings: Any) -> SamplingRows:
    """n rows; a setting is a number for all of them or a list. Seeds count up unless given."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "noise_position": 0}
    head = settings.pop("head", 0)
    values = defaults | {"noise_seed": list(range(n))} | settings
    whole = ("top_k", "noise_seed", "noise_position")
    tensors = {
        name: torch.tensor(
            value if isinstance(value, list) else [value] * n, dtype=torch.int64 if name in whole else torch.float32
        )
        for name, value in values.items()
    }
    return SamplingRows(
        **tensors,
        head=head,
        any_random=bool((tensors["temperature"] > 0).any()),
        any_top_k=bool((tensors["top_k"] > 0).any()),
        any_top_p=bool((tensors["top_p"] < 1).any()),
        any_min_p=bool((tensors["min_p"] > 0).any()),
    )


def naive_support(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Ids that may be drawn and their probabilities, by the definition in the module's docstring."""
    best = max(logits)
    weights = {i: math.exp((x - best) / temperature) for i, x in enumerate(logits)}
    order = [i for i in sorted(weights, key=lambda i: (-logits[i], i)) if weights[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i]
        if top_p < 1 and mass >= top_p * total:
            break
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def test_greedy_takes_the_lowest_of_equals(backend: str) -> None:
    logits = torch.randn(5, 1111)
    logits[:, 1000] = logits[:, 70] = logits[:, 900] = 9.0
    assert sample(logits, rows_of(5, temperature=0.0)).tolist() == [70] * 5
    assert sample(torch.zeros(2, 3), rows_of(2, temperature=0.0)).tolist() == [0, 0]
    mixed = sample(logits, rows_of(5, temperature=[0.0, 1.0, 0.0, 2.0, 0.0]))
    assert mixed[[0, 2, 4]].tolist() == [70] * 3


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 600), (4, 5000)])
def test_greedy_equals_argmax(backend: str, shape: tuple[int, int]) -> None:
    logits = torch.randn(shape)
    assert torch.equal(sample(logits, rows_of(shape[0], temperature=0.0)), logits.argmax(-1))
    view = torch.randn(shape[0], 2 * shape[1])[:, : shape[1]]
    assert torch.equal(sample(view, rows_of(shape[0], temperature=0.0)), view.argmax(-1))


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0, "top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("case", CASES)
def test_distribution(backend: str, case: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws with fixed seeds: the drawn ids follow the filtered softmax."""
    torch.manual_seed(1)
    logits, n = torch.randn(40) * 2, 20000
    seeds = [seed * 7919 - 5_000_000_000 for seed in range(100)] * 200
    positions = [i // 100 for i in range(n)]
    drawn = sample(logits.expand(n, 40).contiguous(), rows_of(n, noise_seed=seeds, noise_position=positions, **case))
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | case
    support = naive_support(logits.tolist(), **settings)
    counts = drawn.bincount(minlength=40).tolist()
    assert {i for i, count in enumerate(counts) if count} <= set(support)
    expected = {i: n * p for i, p in support.items()}
    large = {i: e for i, e in expected.items() if e >= 5}
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in large.items())
    degrees = max(len(large) - 1, 1)
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


@pytest.mark.parametrize("vocab", [7, 300, 2000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_filters_keep_what_the_definition_keeps(backend: str, vocab: int, scale: float) -> None:
    """Where the naive reference keeps few ids, many draws must hit exactly these."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * scale
    for top_k, top_p, min_p, temperature in [
        (3, 1.0, 0.0, 1.0),
        (0, 0.3, 0.0, 0.6),
        (0, 1.0, 0.5, 0.9),
        (4, 0.6, 0.1, 1.3),
    ]:
        support = naive_support(logits.tolist(), temperature, top_k, top_p, min_p)
        n = 150
        rows = rows_of(n, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
        drawn = sample(logits.expand(n, vocab).contiguous(), rows)
        assert set(drawn.tolist()) <= set(support)
        for i, p in support.items():
            if p * n > 20:
                assert i in drawn


def test_top_k_cuts_ties_by_id(backend: str) -> None:
    n = 200
    drawn = sample(torch.zeros(n, 50), rows_of(n, top_k=2))
    assert set(drawn.tolist()) == {0, 1}
    assert set(sample(torch.zeros(n, 4), rows_of(n, top_k=100)).tolist()) == {0, 1, 2, 3}
    assert set(sample(torch.zeros(n, 10), rows_of(n, top_p=0.25)).tolist()) == {0, 1, 2}
    assert set(sample(torch.randn(n, 10), rows_of(n, top_p=1e-9)).tolist()) <= set(range(10))


def test_masked_ids_are_never_drawn(backend: str) -> None:
    logits = torch.full((500, 700), -torch.inf)
    logits[:, [3, 650]] = torch.tensor([0.0, -1.0])
    for settings in [{}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}]:
        assert set(sample(logits, rows_of(500, **settings)).tolist()) == {3, 650}


def test_backends_draw_the_same(backend: str) -> None:
    torch.manual_seed(3)
    logits = torch.randn(64, 3001) * 3
    mixed = {
        "temperature": [0.0, 0.7, 1.0, 1.5] * 16,
        "top_k": [0, 0, 20, 0, 5, 0, 0, 3001] * 8,
        "top_p": [1.0] * 32 + [0.9] * 32,
        "min_p": ([0.0] * 8 + [0.05] * 8) * 4,
        "noise_seed": [2**63 - 1, -(2**63), 0, -1] * 16,
        "noise_position": list(range(64)),
    }
    assert torch.equal(sample(logits, rows_of(64, **mixed)), sample_reference(logits, rows_of(64, **mixed)))
    assert torch.equal(sample(logits, rows_of(64, head=3)), sample_reference(logits, rows_of(64, head=3)))


def test_noise_knows_no_batch(backend: str) -> None:
    torch.manual_seed(4)
    logits = torch.randn(12, 900)
    settings = {
        "temperature": [0.8] * 12,
        "top_p": [1.0, 0.9] * 6,
        "noise_seed": list(range(50, 62)),
        "noise_position": [7] * 12,
    }
    together = sample(logits, rows_of(12, **settings))
    order = torch.randperm(12)
    moved = sample(logits[order].contiguous(), rows_of(12, **{k: [v[i] for i in order] for k, v in settings.items()}))
    assert torch.equal(moved, together[order])
    for row in range(12):
        alone = sample(logits[row : row + 1], rows_of(1, **{k: [v[row]] for k, v in settings.items()}))
        assert torch.equal(alone, together[row : row + 1])


def test_seed_position_and_head_each_change_the_noise() -> None:
    base = noise_keys(torch.tensor([5]), torch.tensor([9]), 0)
    seeds = [noise_keys(torch.tensor([s]), torch.tensor([9]), 0) for s in (6, 5 + 2**32, -5)]
    others = [
        *seeds,
        noise_keys(torch.tensor([5]), torch.tensor([10]), 0),
        noise_keys(torch.tensor([5]), torch.tensor([9]), 1),
    ]
    assert len({int(key) for key in [base, *others]}) == 6
    noise = gumbel(torch.cat([base, *others]), 4000)
    assert bool(noise.isfinite().all())
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08
    assert noise.mean() == pytest.approx(0.5772, abs=0.03) and noise.var() == pytest.approx(math.pi**2 / 6, abs=0.08)


# ------------------------------------------------------------------------------------------------- log probabilities


def test_token_logprobs() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(4, 30), torch.tensor([0, 29, 7, 7])
    logprob, rank, top_ids, top_logprobs = token_logprobs(logits, ids, 5)
    expected = logits.double().softmax(-1).log()
    for row in range(4):
        order = expected[row].argsort(descending=True)
        assert float(logprob[row]) == pytest.approx(float(expected[row, ids[row]]), abs=1e-5)
        assert int(order[rank[row] - 1]) == int(ids[row])
        assert top_ids[row].tolist() == order[:5].tolist()
        torch.testing.assert_close(top_logprobs[row].double(), expected[row, order[:5]], atol=1e-5, rtol=0)
    assert token_logprobs(logits, ids, 0)[2].shape == (4, 0) and token_logprobs(logits, ids, 99)[2].shape == (4, 30)
    low_precision = token_logprobs(logits.bfloat16(), ids, 1)[0]
    assert low_precision.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------ logits edits


def test_penalties_equal_the_naive_ones() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 20)
    context = [[1, 2, 2, 3, 19, 25], [], [4, 4, 4], [0, 1]]
    output = [[2, 2, 3], [], [4, 4, 4, 99], [1]]
    presence, frequency, repetition = [0.5, 1.0, 0.0, -0.5], [0.25, 1.0, 0.0, 0.1], [1.3, 2.0, 0.8, 1.0]
    expected = logits.clone()
    for row in range(4):
        for token in range(20):
            x = float(logits[row, token])
            if token in context[row]:
                x = x / repetition[row] if x > 0 else x * repetition[row]
            count = output[row].count(token)
            expected[row, token] = x - frequency[row] * count - presence[row] * (count > 0)
    apply_penalties(logits, context, output, presence, frequency, repetition)
    torch.testing.assert_close(logits, expected)


def test_bias_and_allowed() -> None:
    logits = torch.zeros(2, 10)
    apply_bias(logits[1], [3, 9], [2.5, -100.0])
    assert logits[0].tolist() == [0.0] * 10 and logits[1, 3] == 2.5 and logits[1, 9] == -100
    for ranges, kept in [([(2, 4), (8, 99)], {2, 3, 8, 9}), ([], set()), ([(5, 7), (0, 1), (6, 8)], {0, 5, 6, 7})]:
        row = torch.zeros(10)
        apply_allowed(row, ranges)
        assert {i for i, x in enumerate(row.tolist()) if x == 0} == kept


def test_many_rows_are_edited_as_one_by_one() -> None:
    """Ranges of different number, and a context in which ids stand more than once."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 50, generator=generator)
    expected = logits.clone()
    context = torch.randint(50, (3, 20), generator=generator)
    context[:, 10:] = context[:, :10]
    penalties = [1.1, 0.5, 1.0]
    apply_penalties(expected, context.tolist(), [[]] * 3, [0.0] * 3, [0.0] * 3, penalties)
    apply_repetition(logits, context, torch.tensor(penalties)[:, None])
    assert torch.equal(logits, expected)
    ranges = [[(0, 3), (40, 50)], [(7, 8)], []]
    for row, mine in zip(expected, ranges, strict=True):
        apply_allowed(row, mine)
    low, high = torch.tensor([[0, 40], [7, 0], [0, 0]]), torch.tensor([[3, 50], [8, 0], [0, 0]])
    apply_ranges(logits, low, high)
    assert torch.equal(logits, expected)

"""Sampling in Triton draws what the plain torch twin draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from motet.kernels.sampling import SamplingRows, gumbel, noise_keys, sample, sample_reference


def rows_of(n: int, *, head: int = 0, **settings: Any) -> SamplingRows:
    """n rows; a setting is a number for all of them or a list."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "noise_seed": list(range(n))}
    tensors = {}
    for name, value in (defaults | {"noise_position": 0} | settings).items():
        whole = name in ("top_k", "noise_seed", "noise_position")
        values = value if isinstance(value, list) else [value] * n
        tensors[name] = torch.tensor(values, dtype=torch.int64 if whole else torch.float32)
    return SamplingRows(
        **tensors,
        head=head,
        any_random=bool((tensors["temperature"] > 0).any()),
        any_top_k=bool((tensors["top_k"] > 0).any()),
        any_top_p=bool((tensors["top_p"] < 1).any()),
        any_min_p=bool((tensors["min_p"] > 0).any()),
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5000), (1, 33000)])
def test_greedy_equals_argmax(shape: tuple[int, int]) -> None:
    logits = torch.randn(shape)
    assert torch.equal(sample(logits, rows_of(shape[0], temperature=0.0)), logits.argmax(-1))
    view = torch.randn(shape[0], 2 * shape[1])[:, : shape[1]]
    assert torch.equal(sample(view, rows_of(shape[0], temperature=0.0)), view.argmax(-1))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.randn(3, 9000)
    logits[:, 8800] = logits[:, 70] = logits[:, 900] = 9.0
    assert sample(logits, rows_of(3, temperature=0.0)).tolist() == [70] * 3
    assert sample(torch.full((2, 5000), -torch.inf), rows_of(2, temperature=[0.0, 1.0])).tolist() == [0, 0]


def test_nan_wins_its_row() -> None:
    """The runner looks at the chosen logit to find a broken row."""
    logits = torch.randn(3, 9000)
    logits[1, 8500] = torch.nan
    for temperature in (0.0, 1.0):
        ids = sample(logits, rows_of(3, temperature=temperature))
        assert ids[1] == 8500 and bool(logits[[0, 2], ids[[0, 2]]].isfinite().all())


@pytest.mark.parametrize("head", [0, 3, 77])
def test_draws_what_torch_draws(head: int) -> None:
    """16 rows of 4,500 ids; seeds and positions at the ends of their range."""
    torch.manual_seed(3)
    logits = torch.randn(16, 4500) * 3
    mixed = {
        "temperature": [0.0, 0.7, 1.0, 1.5] * 4,
        "noise_seed": [2**63 - 1, -(2**63), 0, -1] * 4,
        "noise_position": [0, 1, 2**31, 2**40] + list(range(12)),
    }
    filters = {"top_k": [0, 0, 20, 5] * 4, "top_p": [1.0] * 8 + [0.9] * 8, "min_p": ([0.0] * 2 + [0.05] * 2) * 4}
    for rows in (rows_of(16, head=head, **mixed), rows_of(16, head=head, **mixed, **filters)):
        assert torch.equal(sample(logits, rows), sample_reference(logits, rows))


def test_many_draws_are_the_twins() -> None:
    """100 draws from 60 ids."""
    torch.manual_seed(4)
    logits = (torch.randn(60) * 2).expand(100, 60).contiguous()
    rows = rows_of(100)
    assert torch.equal(sample(logits, rows), sample_reference(logits, rows))


def test_noise_is_the_twins() -> None:
    """Flat logits show the noise itself: at temperature 1 the best of 20,000 ids is the largest noise."""
    key = noise_keys(torch.arange(8), torch.arange(8) * 1000, 5)
    noise = gumbel(key, 20000)
    rows = rows_of(8, head=5, noise_position=[position * 1000 for position in range(8)])
    for place in (noise.argmax(-1), noise.argmin(-1)):
        # Leave two ids: the one looked at, and id 0 lifted to its height less or more than rounding can explain.
        value = noise.gather(1, place[:, None])[:, 0]
        for lift, winner in ((-1e-5, place), (1e-5, torch.zeros(8, dtype=torch.int64))):
            logits = torch.full((8, 20000), -torch.inf)
            logits.scatter_(1, place[:, None], 0.0)
            logits[:, 0] = value - noise[:, 0] + lift
            assert torch.equal(sample(logits, rows), winner)


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 10), rows_of(0)).shape == (0,)

"""The bounds of the queue, with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine.errors import Overloaded
from motet.streaming.admission import MAX_RETRY_AFTER_S, Admission, Ticket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_both_bounds() -> None:
    seen: list[tuple[int, int]] = []
    admission = Admission(max_requests=2, max_tokens=100, on_change=lambda n, tokens: seen.append((n, tokens)))
    first = admission.admit(1, 60)
    with pytest.raises(Overloaded, match="60 prompt tokens are waiting, the limit is 100"):
        admission.admit(1, 41)
    second = admission.admit(1, 40)
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2"):
        admission.admit(1, 0)
    first.leave()
    first.leave()
    admission.admit(1, 1)
    second.leave()
    assert (admission.num_requests, admission.num_tokens) == (1, 1)
    assert seen == [(1, 60), (2, 100), (1, 40), (2, 41), (1, 1)]


def test_the_large_one_comes_in_alone() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    ticket = admission.admit(5, 1000)
    with pytest.raises(Overloaded):
        admission.admit(1, 1)
    ticket.leave()
    admission.admit(1, 1)


def test_retry_after_follows_the_rate() -> None:
    clock = Clock()
    admission = Admission(max_requests=10, max_tokens=10_000, clock=clock)
    assert admission.retry_after_s() == 1.0  # nothing known yet
    for _ in range(50):  # 100 tokens per second
        ticket = admission.admit(1, 100)
        clock.now += 1.0
        ticket.leave()
    admission.admit(1, 2000)
    assert 8 < admission.retry_after_s() < 13  # half of 2000 at 100 per second
    clock.now += 1000.0
    assert admission.retry_after_s() == MAX_RETRY_AFTER_S


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50), st.booleans())))
def test_counts_come_back_to_zero(steps: list[tuple[int, int, bool]]) -> None:
    admission = Admission(max_requests=8, max_tokens=100)
    tickets: list[Ticket] = []
    for num_requests, num_tokens, leave in steps:
        try:
            tickets.append(admission.admit(num_requests, num_tokens))
        except Overloaded as error:
            assert error.retry_after_s is not None and error.retry_after_s >= 1
        if leave and tickets:
            tickets.pop(0).leave()
        assert len(tickets) == 1 or (admission.num_requests <= 8 and admission.num_tokens <= 100)
    for ticket in tickets:
        ticket.leave()
    assert (admission.num_requests, admission.num_tokens) == (0, 0)

"""How much may wait: a bound on requests, and on prompt tokens, that were let in and have no first token yet.

Plain Python, clock injected. Knows nothing of HTTP or engines: `admit` gives a ticket or raises Overloaded with the
time after which trying again makes sense, estimated from how fast the queue has been draining.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..engine.errors import Overloaded

MAX_RETRY_AFTER_S = 60.0
_MEMORY_S = 10.0  # how far back the drain rate looks


class Ticket:
    """The place of one request in the queue. `leave()` when its first token came or it ended; twice is fine."""

    __slots__ = ("_admission", "num_requests", "num_tokens")

    def __init__(self, admission: Admission, num_requests: int, num_tokens: int) -> None:
        self._admission: Admission | None = admission
        self.num_requests = num_requests
        self.num_tokens = num_tokens

    def leave(self) -> None:
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission._left(self)


class Admission:
    """The bounds and what is inside them now. `on_change(num_requests, num_tokens)` is told of every change."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[int, int], None] = lambda num_requests, num_tokens: None,
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self._clock = clock
        self._on_change = on_change
        self._drained = 0.0  # prompt tokens that left, older ones fading
        self._drained_at = clock()

    def admit(self, num_requests: int, num_tokens: int) -> Ticket:
        """Let in `num_requests` sequences with `num_tokens` prompt tokens in all, or raise Overloaded.

        What is too large for the bounds by itself still comes in when nothing else waits.
        """
        if self.num_requests > 0:
            if self.num_requests + num_requests > self.max_requests:
                raise self._overloaded(f"{self.num_requests} requests are waiting, the limit is {self.max_requests}")
            if self.num_tokens + num_tokens > self.max_tokens:
                raise self._overloaded(f"{self.num_tokens} prompt tokens are waiting, the limit is {self.max_tokens}")
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self._on_change(self.num_requests, self.num_tokens)
        return Ticket(self, num_requests, num_tokens)

    def retry_after_s(self) -> float:
        """Seconds until about half of what waits now will have left."""
        self._fade()
        rate = self._drained / _MEMORY_S  # tokens per second
        if rate <= 0:
            return 1.0
        return min(max(self.num_tokens / 2 / rate, 1.0), MAX_RETRY_AFTER_S)

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(f"the server is busy: {why}", retry_after_s=self.retry_after_s())

    def _left(self, ticket: Ticket) -> None:
        self.num_requests -= ticket.num_requests
        self.num_tokens -= ticket.num_tokens
        assert self.num_requests >= 0 and self.num_tokens >= 0, "a ticket left twice"
        self._fade()
        self._drained += ticket.num_tokens
        self._on_change(self.num_requests, self.num_tokens)

    def _fade(self) -> None:
        now = self._clock()
        self._drained *= math.exp((self._drained_at - now) / _MEMORY_S)
        self._drained_at = now

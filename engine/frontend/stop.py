"""Stop strings over a stream: find the first one, and hold back only what may still become one.

An automaton over characters (Aho-Corasick): its state is the longest tail of the text that begins some stop string, so
the number of characters to hold back is the depth of the state, no more. Plain Python, knows text only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidRequest

MAX_STOPS = 64
MAX_STOP_CHARS = 1000


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The distinct stop strings. Raises InvalidRequest for too many, too long, empty or not text."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: expected at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise InvalidRequest(f"stop: expected text, got {type(stop).__name__}", param="stop")
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stop: expected 1 to {MAX_STOP_CHARS} characters, got {len(stop)}", param="stop")
    return tuple(dict.fromkeys(stops))


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` was found at characters start..end of all text fed so far."""

    stop: str
    start: int
    end: int


class StopAutomaton:
    """The automaton of a set of stop strings. Immutable; shared by all choices of a request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            state = 0
            for char in stop:
                state = self.edges[state].setdefault(char, len(self.edges))
                if state == len(self.edges):
                    self.edges.append({})
                    self.depth.append(0)
                    self.found.append(None)
            self.depth[state] = len(stop)
            self.found[state] = stop
        self.fail = [0] * len(self.edges)
        self._link()

    def _link(self) -> None:
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self.edges[state].items():
                self.depth[child] = self.depth[state] + 1
                if state:
                    self.fail[child] = self.step(self.fail[state], char)
                    # Only a shorter stop string can end where none of our own does.
                    self.found[child] = self.found[child] or self.found[self.fail[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (following := self.edges[state].get(char)) is None:
            if not state:
                return 0
            state = self.fail[state]
        return following


class StopMatcher:
    """One stream's position in the automaton."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._seen = 0  # characters fed

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return self._automaton.depth[self._state]

    def feed(self, text: str) -> StopMatch | None:
        """The first stop string that ends in this text; of several ending there, the longest. Feed nothing after it."""
        step, found = self._automaton.step, self._automaton.found
        for at, char in enumerate(text, 1):
            self._state = step(self._state, char)
            if (stop := found[self._state]) is not None:
                end = self._seen + at
                return StopMatch(stop, end - len(stop), end)
        self._seen += len(text)
        return None

    def skip(self, text: str) -> None:
        """Text in which nothing counts (the first `min_tokens` tokens); matching begins anew after it."""
        self._seen += len(text)
        self._state = 0

"""Which language a recording is in: asked of a few windows of its speech until one is sure enough. Pure."""

from __future__ import annotations

from collections.abc import Mapping

SURE = 0.5  # a probability above it settles the question


class LanguageChoice:
    """One recording's language. `code` is None until it is known; `busy` while a window is being asked.

    Windows are asked one after another, in their order, so that the answer does not depend on what else is running.
    """

    def __init__(self, code: str | None = None, *, max_looks: int = 1) -> None:
        self.code = code
        self.probability = 1.0 if code is not None else 0.0
        self.busy = False
        self._max_looks = max(1, max_looks)
        self._num_looks = 0
        self._sums: dict[str, float] = {}

    @property
    def sure(self) -> bool:
        return self.code is not None and self.probability > SURE

    def observe(self, probabilities: Mapping[str, float]) -> None:
        """What one window sounds like. Settled by a sure window, else by the sum over `max_looks` of them."""
        self._num_looks += 1
        for code, probability in probabilities.items():
            self._sums[code] = self._sums.get(code, 0.0) + probability
        best = max(probabilities, key=lambda code: probabilities[code])
        if probabilities[best] > SURE:
            self.code, self.probability = best, probabilities[best]
        elif self._num_looks >= self._max_looks:
            self.code = max(self._sums, key=lambda code: self._sums[code])
            self.probability = self._sums[self.code] / self._num_looks

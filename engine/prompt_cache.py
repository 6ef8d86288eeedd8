"""The last prompts' embeddings, by their text. Torch-free: what an embedding is, is the painter's business."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class PromptCache:
    """The last prompts' embeddings, by text; at most `max_bytes`. The empty prompt of every guided request is soon among them."""

    def __init__(self, max_bytes: int, num_bytes: Callable[[Any], int]) -> None:
        self._max_bytes = max_bytes
        self._size = num_bytes
        self._conds: OrderedDict[str, Any] = OrderedDict()
        self.num_bytes = 0

    def get(self, prompt: str) -> Any | None:
        cond = self._conds.get(prompt)
        if cond is not None:
            self._conds.move_to_end(prompt)
        return cond

    def put(self, prompt: str, cond: Any) -> None:
        size = self._size(cond)
        if prompt in self._conds or size > self._max_bytes:
            return
        self._conds[prompt] = cond
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, oldest = self._conds.popitem(last=False)
            self.num_bytes -= self._size(oldest)

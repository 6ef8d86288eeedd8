"""The door for draft proposers. A proposer changes speed only: the target's own sample is emitted at every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class View:
    """What a proposer may see of a sequence. `room` bounds the number of drafts."""

    token_ids: Sequence[int]
    num_prompt: int
    room: int


@dataclass(kw_only=True)
class Drafts:
    """A draft tree: `parents[i]` is the index of draft i's parent, -1 for the last known token; parents come first."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


class Proposer(Protocol):
    def propose(self, view: View, aux_hidden: Any | None) -> Drafts:
        """At most `view.room` drafts for what follows `view.token_ids`."""
        ...

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        """How the last drafts fared."""
        ...

"""A sequence: what the scheduler knows of one request while it lives. No tensors, no clocks.

WAITING ─────────────► RUNNING ─────────► FINISHED
   ▲                   │     ▲ ▲
   │                   │     │ └── append ── WAITING_FOR_INPUT (open requests that ran out of input)
   └──── PREEMPTED ◄───┘     └─────────────────────────────┘
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .cache.manager import BlockTables
from .types import EmbeddingSpan, Request, SideIds, TokenLogprob


class State(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_INPUT = "waiting_for_input"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_ENCODER = "waiting_for_encoder"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# States in which a queued sequence cannot be admitted, whatever is free; it never blocks those behind it.
PARKED = frozenset(
    {State.WAITING_FOR_INPUT, State.WAITING_FOR_GRAMMAR, State.WAITING_FOR_ENCODER, State.WAITING_FOR_KV}
)


@dataclass(kw_only=True, eq=False)
class Sequence:
    """`num_computed` counts positions whose K and V are computed or launched; `num_unknown` counts output tokens that are
    launched but not yet known (depth > 0); `num_in_flight` counts plans that name this sequence."""

    request: Request
    seed: int
    order: int  # arrival number; a preempted sequence keeps it, and with it its seniority
    arrival: float  # seconds on the engine's clock
    priority: int
    token_ids: list[int]
    num_prompt: int
    max_output: int
    stop_ids: frozenset[int]  # the request's own, and EOS unless ignored
    root: bytes
    tables: BlockTables
    embeddings: list[EmbeddingSpan]
    input_open: bool
    state: State = State.WAITING
    slot: int = -1
    num_computed: int = 0
    num_part: int = 0  # positions behind `num_computed` that have passed some layers only
    part_layers: int = 0  # how many
    num_unknown: int = 0
    num_in_flight: int = 0
    leaving: bool = False  # blocks and slot go back when the last plan that names it lands
    num_preemptions: int = 0
    num_cached: int = 0
    unsent_ids: list[int] = field(default_factory=list)  # input that the executor has not seen yet
    unsent_embeddings: list[EmbeddingSpan] = field(default_factory=list)
    side_ids: list[list[int]] = field(default_factory=list)  # of multi-codebook models: one entry per output token
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    input_since: float = 0.0  # when it last got input
    first_scheduled: float | None = None
    first_token: float | None = None
    num_events: int = 0
    held: bool = False  # keeps slot and blocks, and gets no work: somebody else's audio is due first

    @property
    def sort_key(self) -> tuple[int, int]:
        return (self.priority, self.order)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def side(self) -> list[SideIds]:
        """Side ids of all known positions that have any; the lists in it are the sequence's own."""
        if not self.side_ids:
            return self.request.side
        return [*self.request.side, SideIds(start=self.num_prompt, ids=self.side_ids)]

    @property
    def num_tokens(self) -> int:
        """Prompt and output, launched tokens included."""
        return len(self.token_ids) + self.num_unknown

    @property
    def num_pending(self) -> int:
        """Positions that could be computed now. An open request holds its last one back, to sample from it at the end."""
        if self.held or (self.num_tokens - self.num_prompt >= self.max_output and self.max_output > 0):
            return 0
        target = self.num_tokens - 1 if self.input_open else self.num_tokens
        return target - self.num_computed

    @property
    def in_parts(self) -> bool:
        """Whether its prompt may pass the layers in several steps: nobody asks for the hidden rows of a chunk."""
        return self.request.task == "generate" and self.request.params.prompt_logprobs is None

    @property
    def wants_sample(self) -> bool:
        return self.request.task == "generate" and self.max_output > 0 and not self.input_open

    @property
    def ready(self) -> bool:
        """May be admitted from the queue."""
        return self.state not in PARKED and self.num_in_flight == 0

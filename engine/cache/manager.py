"""KV groups over one block pool: block tables, prefix hits, window trimming. Policy only, no tensors.

Layers with equal KVSpec form groups of one size, so that a page (one block for all layers of a group) has one byte size and
one pool serves all groups. Full and window groups are here; other kinds are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...models.spec import KVSpec
from .block_pool import NULL_BLOCK, BlockPool


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that share a block table. `window` 0 means full attention."""

    layers: tuple[int, ...]
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class Span:
    """Positions [start, start + length) that need no computing, and where their K and V lie."""

    start: int
    length: int
    src: Literal["device", "host", "remote"] = "device"
    kind: Literal["exact", "blend"] = "exact"
    load_ms: float = 0.0


@dataclass(kw_only=True)
class BlockTables:
    """One sequence's blocks: per group, append-only while it runs. `keys` is the hash chain of its full blocks."""

    blocks: list[list[int]]
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_trimmed: list[int] = field(default_factory=list)  # per group: leading blocks already given back


def make_groups(specs: Sequence[KVSpec]) -> list[KVGroup]:
    """Groups for a model's layers, all with the same number of layers but the last of each kind.

    Raises ValueError naming the kind when a layer needs a cache that does not exist yet, or when pages would differ in size.
    """
    by_window: dict[int, list[int]] = {}
    shapes = set()
    for layer, spec in enumerate(specs):
        if spec.kind == "none":
            continue
        if spec.kind not in ("full", "window"):
            raise ValueError(f"layer {layer} needs a KV cache of kind {spec.kind!r}; this engine has: full, window")
        shapes.add((spec.num_kv_heads, spec.head_dim))
        by_window.setdefault(spec.window if spec.kind == "window" else 0, []).append(layer)
    if len(shapes) > 1:
        raise ValueError(f"layers with different KV shapes in one model are not supported: {sorted(shapes)}")
    size = min((len(layers) for layers in by_window.values()), default=1)
    return [
        KVGroup(layers=tuple(layers[i : i + size]), window=window)
        for window, layers in sorted(by_window.items())
        for i in range(0, len(layers), size)
    ]


class CacheManager:
    """Blocks for sequences. A sequence's state is its `BlockTables`, held by the caller."""

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], block_size: int, *, caching: bool = True) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.block_size = block_size
        self.caching = caching
        self._suffix = [bytes([index]) for index in range(len(groups))]

    def new_tables(self) -> BlockTables:
        return BlockTables(blocks=[[] for _ in self.groups], num_trimmed=[0] * len(self.groups))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` can hold at once, all groups together.

        Window groups count whole: a prompt's blocks are all taken at admission and trimmed as it is computed.
        """
        return len(self.groups) * -(-num_tokens // self.block_size)

    def lookup(self, keys: Sequence[bytes], num_tokens: int) -> tuple[list[Span], list[list[int]]]:
        """The longest cached prefix on which every group agrees, at most `num_tokens - 1` long. No side effects.

        Returns the spans (at most one here: device memory is the only tier yet) and, per group, the block ids of the
        prefix; blocks that a window group no longer needs are the null block.
        """
        limit = min(len(keys), (num_tokens - 1) // self.block_size)
        if not self.caching or limit <= 0:
            return [], [[] for _ in self.groups]
        length = limit
        while length > 0:
            shorter = length
            for index, group in enumerate(self.groups):
                shorter = min(shorter, self._longest(index, group, keys, shorter))
            if shorter == length:
                break
            length = shorter
        if length == 0:
            return [], [[] for _ in self.groups]
        tables = []
        for index, group in enumerate(self.groups):
            first = self._first_needed_block(group, length * self.block_size)
            blocks = [NULL_BLOCK] * first
            for key in keys[first:length]:
                block = self.pool.lookup(key + self._suffix[index])
                assert block is not None
                blocks.append(block)
            tables.append(blocks)
        return [Span(start=0, length=length * self.block_size)], tables

    def num_new_blocks(self, tables: BlockTables, num_tokens: int) -> int:
        """Blocks that must be handed out so that positions < num_tokens have a place."""
        need = -(-num_tokens // self.block_size)
        return sum(max(0, need - len(blocks)) for blocks in tables.blocks)

    def num_revived(self, hit: Sequence[Sequence[int]]) -> int:
        """Blocks of a hit that are free now: taking the hit uses them up."""
        return sum(1 for blocks in hit for block in blocks if block != NULL_BLOCK and self.pool.is_free(block))

    def adopt(self, tables: BlockTables, hit: Sequence[Sequence[int]]) -> None:
        """Take a lookup's blocks as the start of an empty sequence."""
        for index, blocks in enumerate(hit):
            assert not tables.blocks[index]
            self.pool.share(blocks)
            tables.blocks[index] = list(blocks)
            tables.num_trimmed[index] = sum(1 for block in blocks if block == NULL_BLOCK)
        tables.num_published = len(hit[0]) if hit else 0

    def allocate(self, tables: BlockTables, num_tokens: int) -> list[list[int]] | None:
        """New blocks per group so that positions < num_tokens have a place; None, and nothing taken, if they are short."""
        if self.num_new_blocks(tables, num_tokens) > self.pool.num_free:
            return None
        need = -(-num_tokens // self.block_size)
        new = []
        for blocks in tables.blocks:
            got = self.pool.allocate(max(0, need - len(blocks)))
            blocks.extend(got)
            new.append(got)
        return new

    def publish(self, tables: BlockTables, num_valid: int) -> None:
        """Make full blocks below position `num_valid` findable. `tables.keys` must reach that far."""
        if not self.caching:
            return
        full = min(num_valid // self.block_size, len(tables.keys))
        for position in range(tables.num_published, full):
            for index, blocks in enumerate(tables.blocks):
                self.pool.publish(blocks[position], tables.keys[position] + self._suffix[index])
        tables.num_published = max(tables.num_published, full)

    def trim(self, tables: BlockTables, num_computed: int) -> None:
        """Give back window blocks that no row at or after position `num_computed` can see."""
        for index, group in enumerate(self.groups):
            if not group.window:
                continue
            first = min(self._first_needed_block(group, num_computed), len(tables.blocks[index]))
            blocks = tables.blocks[index]
            gone = [block for block in blocks[tables.num_trimmed[index] : first] if block != NULL_BLOCK]
            if gone:
                self.pool.release(gone)
                blocks[tables.num_trimmed[index] : first] = [NULL_BLOCK] * (first - tables.num_trimmed[index])
            tables.num_trimmed[index] = max(tables.num_trimmed[index], first)

    def release(self, tables: BlockTables) -> None:
        """Give back all blocks, tail first, and empty the tables (the hash chain stays)."""
        for index, blocks in enumerate(tables.blocks):
            self.pool.release(reversed(blocks))
            tables.blocks[index] = []
            tables.num_trimmed[index] = 0
        tables.num_published = 0

    def _first_needed_block(self, group: KVGroup, position: int) -> int:
        """Index of the first block that the row at `position` (and later ones) can see."""
        return max(0, position - group.window + 1) // self.block_size if group.window else 0

    def _longest(self, index: int, group: KVGroup, keys: Sequence[bytes], limit: int) -> int:
        """Longest prefix, in blocks and at most `limit`, that this group can serve."""
        suffix = self._suffix[index]
        if not group.window:
            for count in range(limit):
                if self.pool.lookup(keys[count] + suffix) is None:
                    return count
            return limit
        # A window group needs only the tail of the prefix: walk back from the limit, counting unbroken blocks.
        length, run = limit, 0
        for position in range(limit - 1, -1, -1):
            if self.pool.lookup(keys[position] + suffix) is None:
                length, run = position, 0
                continue
            run += 1
            if position <= self._first_needed_block(group, length * self.block_size):
                return length
        return length if run == length else 0

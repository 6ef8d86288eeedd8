"""The block pool: pages of one size, reference counts, and the hashes of what free pages still hold.

A free block keeps its key until it is handed out again, so "free" and "evictable, least recently used first" are one list.
Where memory is taken when it is first written (on a CPU), only the first `num_resident` blocks are used up like that; later ones
are begun only when every other is in use, since a block once written stays in memory.
Knows nothing of sequences, groups or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0  # padding and skipped window blocks; never handed out, never freed, never published


class BlockPool:
    """Hands out block ids 1..num_blocks-1. All operations are O(1) per block."""

    def __init__(self, num_blocks: int, *, num_resident: int | None = None) -> None:
        """`num_resident` None: all of them."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks: expected at least 2, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # Free blocks, least recently used first. A dict keeps insertion order and removes from the middle in O(1).
        self._fresh = (
            num_blocks if num_resident is None else max(2, min(num_resident, num_blocks))
        )  # the first unused one
        self._free: dict[int, None] = dict.fromkeys(range(1, self._fresh))

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._fresh

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out (all but the null block)."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        return len(self._by_key)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the oldest free ones lose what they held. Ask `num_free` first."""
        assert 0 <= count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blocks = []
        for _ in range(count):
            if self._free:
                block = next(iter(self._free))
                del self._free[block]
                self._forget(block)
            else:
                block, self._fresh = self._fresh, self._fresh + 1
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def is_free(self, block: int) -> bool:
        return block in self._free or block >= self._fresh

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block (a prefix hit); free ones come back to life."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference each. Pass the tail of a sequence first: it is then the first to be evicted."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released more often than taken"
            if self._refs[block] == 0:
                self._free[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Say what a full block holds. The first block with a key keeps it; duplicates stay unkeyed."""
        if block != NULL_BLOCK and self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def lookup(self, key: bytes) -> int | None:
        """The block that holds `key`, or None. No side effects."""
        return self._by_key.get(key)

    def clear_cache(self) -> None:
        """Forget what every block holds (new weights)."""
        self._by_key.clear()
        self._keys = [None] * self.num_blocks

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert NULL_BLOCK not in self._free and self._refs[NULL_BLOCK] == 0
        for block in range(1, self.num_blocks):
            assert (self._refs[block] == 0) == self.is_free(block), f"block {block}: refs {self._refs[block]}"
        for key, block in self._by_key.items():
            assert self._keys[block] == key

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            if self._by_key.get(key) == block:
                del self._by_key[key]

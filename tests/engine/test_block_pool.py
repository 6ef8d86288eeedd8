"""The block pool and the cache manager, without torch: references, eviction order, hits on every group."""

from __future__ import annotations

import pytest

from motet.engine.cache.block_pool import BlockPool
from motet.engine.cache.hashing import extend_chain, root_key
from motet.engine.cache.layout import KVLayout
from motet.engine.cache.manager import CacheManager, KVGroup, make_groups
from motet.engine.types import Blob, EmbeddingSpan
from motet.models.spec import KVSpec


def keys_of(ids: list[int], root: bytes = b"root", spans: tuple[EmbeddingSpan, ...] = ()) -> list[bytes]:
    keys: list[bytes] = []
    extend_chain(keys, root, ids, 4, spans)
    return keys


def test_free_blocks_keep_what_they_hold_until_handed_out_again() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.publish(a, b"A")
    pool.publish(b, b"B")
    pool.release([b, a])  # b first: it is evicted first
    assert pool.lookup(b"A") == a and pool.lookup(b"B") == b
    assert pool.allocate(1) == [b]
    assert pool.lookup(b"B") is None and pool.lookup(b"A") == a
    pool.share([a])
    assert pool.num_free == 0
    pool.release([a, b, c])
    pool.check()
    assert pool.num_free == pool.num_usable == 3


def test_null_block_is_never_handed_out_published_or_freed() -> None:
    pool = BlockPool(3)
    assert 0 not in pool.allocate(2)
    pool.publish(0, b"x")
    pool.share([0])
    pool.release([0])
    assert pool.lookup(b"x") is None
    pool.check()


def test_first_block_with_a_key_keeps_it() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.publish(a, b"K")
    pool.publish(b, b"K")
    pool.release([b])
    pool.allocate(2)
    assert pool.lookup(b"K") == a
    pool.check()


def test_keys_depend_on_everything_that_k_and_v_depend_on() -> None:
    def root(**changes: object) -> bytes:
        return root_key(**({"model": "m", "weight_epoch": 0, "cache_salt": ""} | changes))  # type: ignore[arg-type]

    roots = [root(), root(model="n"), root(weight_epoch=1), root(cache_salt="t"), root(model="", cache_salt="m")]
    assert len(set(roots)) == len(roots)
    ids = list(range(12))
    assert keys_of(ids) == keys_of(ids + [7])[:3]
    assert keys_of(ids)[1] != keys_of([9, *ids[1:]])[1]  # a chain: an early change reaches later blocks

    def span(start: int, data: bytes) -> EmbeddingSpan:
        return EmbeddingSpan(start=start, blob=Blob(dtype="uint8", shape=(2, 1), data=data))

    variants = [(), (span(5, b"ab"),), (span(6, b"ab"),), (span(5, b"ac"),)]
    chains = [keys_of(ids, spans=spans) for spans in variants]
    assert len({chain[0] for chain in chains}) == 1  # block 0 is before all of them
    assert len({chain[1] for chain in chains}) == 4


def test_groups_are_made_of_equal_specs_and_others_are_refused_by_name() -> None:
    full = KVSpec(kind="full", num_kv_heads=2, head_dim=8)
    window = KVSpec(kind="window", num_kv_heads=2, head_dim=8, window=16)
    specs = [window] * 5 + [full] + [window] * 5 + [full]
    groups = make_groups(specs)
    assert all(len(group.layers) <= 2 for group in groups)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(12))
    assert {layer for group in groups if group.window == 0 for layer in group.layers} == {5, 11}
    for kind in ("latent", "cross", "state"):
        with pytest.raises(ValueError, match=kind):
            make_groups([full, KVSpec(kind=kind, num_kv_heads=1, head_dim=8)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different KV shapes"):
        make_groups([full, KVSpec(kind="full", num_kv_heads=1, head_dim=8)])
    assert make_groups([full, KVSpec(kind="none", num_kv_heads=0, head_dim=0)])[0].layers == (0,)


def test_lookup_stops_one_token_short_and_has_no_side_effects() -> None:
    manager = CacheManager(BlockPool(16), [KVGroup(layers=(0,))], 4)
    ids = list(range(12))
    tables = manager.new_tables()
    tables.keys = keys_of(ids)
    manager.allocate(tables, 12)
    manager.publish(tables, 11)  # the third block is not full yet
    manager.release(tables)
    num_free = manager.pool.num_free
    spans, hit = manager.lookup(keys_of(ids), 12)
    assert [(span.start, span.length) for span in spans] == [(0, 8)]
    assert len(hit[0]) == 2 and manager.pool.num_free == num_free
    # Exactly 8 known tokens: one must be computed for its logits.
    assert manager.lookup(keys_of(ids[:8]), 8)[0][0].length == 4
    assert manager.lookup(keys_of(ids[:4]), 4)[0] == []


def test_hit_is_the_longest_length_on_which_every_group_agrees() -> None:
    groups = [KVGroup(layers=(0,)), KVGroup(layers=(1,), window=6)]
    manager = CacheManager(BlockPool(64), groups, 4)
    ids = list(range(40))
    tables = manager.new_tables()
    tables.keys = keys_of(ids)
    manager.allocate(tables, 40)
    manager.publish(tables, 40)
    manager.trim(tables, 40)
    assert tables.blocks[1][:8] == [0] * 8 and 0 not in tables.blocks[1][8:]
    full_blocks, window_blocks = list(tables.blocks[0]), list(tables.blocks[1])
    manager.release(tables)
    spans, hit = manager.lookup(tables.keys, 40)
    assert spans[0].length == 36
    assert hit[0] == full_blocks[:9]
    assert hit[1][7:] == window_blocks[7:9] or hit[1][:7] == [0] * 7
    # Evict the window group's ninth block: nine blocks no longer work, and eight need the trimmed ones, which still exist.
    manager.pool.allocate(manager.pool.num_free)
    assert manager.lookup(tables.keys, 40)[0] == []


def test_allocation_is_all_or_nothing() -> None:
    manager = CacheManager(BlockPool(6), [KVGroup(layers=(0,)), KVGroup(layers=(1,), window=8)], 4)
    tables = manager.new_tables()
    assert manager.allocate(tables, 12) is None
    assert manager.pool.num_free == 5 and tables.blocks == [[], []]
    assert manager.allocate(tables, 8) is not None
    assert manager.pool.num_free == 1


def test_layout_digest_changes_with_every_field() -> None:
    fields = {"model": "m", "weight_epoch": 0, "num_layers": 2, "num_kv_heads": 2, "block_size": 4, "head_dim": 8}
    layout = KVLayout(**fields, dtype="float32")  # type: ignore[arg-type]
    assert layout.shape == (2, 2, 2, 4, 8)
    others = [KVLayout(**(fields | {name: 9}), dtype="float32") for name in fields if name != "model"]  # type: ignore
    others += [KVLayout(**fields, dtype="bfloat16"), KVLayout(**fields, dtype="float32", tp_rank=1, tp_size=2)]  # type: ignore
    assert len({layout.digest, *(other.digest for other in others)}) == len(others) + 1


def test_blocks_beyond_the_resident_ones_are_begun_only_in_need() -> None:
    pool = BlockPool(8, num_resident=4)  # 1..3 first
    assert pool.num_free == 7 and pool.num_usable == 7 and pool.is_free(6)
    for key in (b"a", b"b"):
        taken = pool.allocate(3)
        assert sorted(taken) == [1, 2, 3]
        pool.publish(taken[0], key)
        pool.release(reversed(taken))
        pool.check()
    assert pool.lookup(b"a") is None and pool.lookup(b"b") == 3  # evicted before a new block was begun
    many = pool.allocate(5)
    assert sorted(many) == [1, 2, 3, 4, 5] and pool.num_free == 2 and not pool.is_free(5)
    pool.check()
    pool.release(reversed(many))
    assert sorted(pool.allocate(7)) == list(range(1, 8)) and pool.num_free == 0
    pool.check()
    with pytest.raises(AssertionError, match="asked for 1 blocks, 0 are free"):
        pool.allocate(1)

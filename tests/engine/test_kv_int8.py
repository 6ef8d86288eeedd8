"""An int8 KV cache in the engine: however a request is served, the tokens are the same; pages move; keys differ."""

from __future__ import annotations

import pytest
import torch

from motet.engine.cache.hashing import extend_chain, root_key
from motet.engine.cache.layout import KVLayout
from motet.engine.llm_engine import LLMEngine
from motet.engine.types import Request
from motet.kernels.attention import SCALE_BYTES, dequantize_rows

from .. import tiny


def engine(**config: object) -> LLMEngine:
    return tiny.engine(kv_dtype="int8", **config)


def several() -> list[Request]:
    return [tiny.request(tiny.prompt(3 + 11 * seed, seed), max_tokens=18) for seed in range(5)]


def test_batched_chunked_and_cached_equal_alone() -> None:
    together = tiny.answers(engine(), several())
    assert [tiny.one(engine(), item) for item in several()] == together
    chunked = engine(max_num_batched_tokens=7)
    assert tiny.answers(chunked, several()) == together
    again = several()
    by_id = tiny.run(chunked, again)
    assert [tiny.tokens(by_id[item.request_id]) for item in again] == together
    assert [by_id[item.request_id][-1].usage.num_cached_tokens for item in again] == [0, 12, 24, 32, 44]
    assert tiny.answers(engine(enable_prefix_caching=False), several()) == together


def test_preempted_equals_not() -> None:
    small = engine(num_blocks=24)
    assert tiny.answers(small, several()) == tiny.answers(engine(), several())
    assert small.scheduler.counters.num_preemptions > 0
    assert tiny.all_free(small)


def test_speculation_changes_nothing() -> None:
    ids = tiny.prompt(6) * 4
    plain = tiny.one(engine(), tiny.request(ids, max_tokens=40))
    assert tiny.one(engine(speculation="ngram"), tiny.request(ids, max_tokens=40)) == plain


def test_it_is_quantized_and_smaller() -> None:
    first, plain = engine(), tiny.engine()
    page, dim = first.executor.runner.pages[0], plain.executor.runner.pages[0].shape[-1]
    assert page.dtype is torch.int8 and page.shape[-1] == dim + SCALE_BYTES
    assert first.info.extra["kv_dtype"] == "int8" and plain.info.extra["kv_dtype"] == "float32"
    assert first.info.extra["kv_bytes"] * 4 * dim == plain.info.extra["kv_bytes"] * (dim + SCALE_BYTES)
    ids = tiny.prompt(9)
    tiny.one(first, tiny.request(ids))
    tiny.one(plain, tiny.request(ids))
    # K and V of layer 0 depend on no other cached number, so rounding is all that parts them.
    one, other = dequantize_rows(page[1:3]), plain.executor.runner.pages[0][1:3]
    bound = other.abs().amax(-1, keepdim=True) / 127 * 0.501
    assert bool(((one - other).abs() <= bound + 1e-6).all()) and bool(other.any())


def test_exported_pages_serve_another_cache() -> None:
    ids = tiny.prompt(20)
    first, second = engine(), engine()
    expected = tiny.one(first, tiny.request(ids))
    source, target = first.executor.runner, second.executor.runner
    keys: list[bytes] = []
    extend_chain(keys, root_key(model=first.info.model, weight_epoch=0, cache_salt="", kv_dtype="int8"), ids, 4)
    from_pool, to_pool = first.scheduler.cache.pool, second.scheduler.cache.pool
    layout = KVLayout(
        model=first.info.model, weight_epoch=0, num_layers=2, num_kv_heads=2, block_size=4, head_dim=8, dtype="int8",
        scale_bytes=SCALE_BYTES,
    )  # fmt: skip
    for key in keys[:4]:
        block = to_pool.allocate(1)[0]
        held = from_pool.lookup(key + b"\0")
        assert held is not None
        page = source.export_page(held)
        assert page.shape == layout.shape
        target.import_page(block, page, digest=layout.digest, expected=layout.digest)
        assert torch.equal(target.export_page(block), page)
        to_pool.publish(block, key + b"\0")
        to_pool.release([block])
    item = tiny.request(ids)
    events = tiny.run(second, [item])[item.request_id]
    assert tiny.tokens(events) == expected
    assert events[-1].usage.num_cached_tokens == 16


def test_keys_and_layouts_tell_the_caches_apart() -> None:
    root = {"model": "m", "weight_epoch": 0, "cache_salt": ""}
    assert root_key(**root) != root_key(**root, kv_dtype="int8")  # type: ignore[arg-type]
    fields = {"model": "m", "weight_epoch": 0, "num_layers": 2, "num_kv_heads": 2, "block_size": 4, "head_dim": 8}
    plain = KVLayout(**fields, dtype="bfloat16")  # type: ignore[arg-type]
    int8 = KVLayout(**fields, dtype="int8", scale_bytes=4)  # type: ignore[arg-type]
    assert plain.digest != int8.digest != KVLayout(**fields, dtype="int8").digest  # type: ignore[arg-type]
    assert int8.shape == (2, 2, 2, 4, 12)
    ids = tiny.prompt(8)
    running = engine()
    tiny.one(running, tiny.request(ids))
    for kv_dtype, found in (("int8", True), ("", False)):
        keys: list[bytes] = []
        extend_chain(keys, root_key(model=running.info.model, weight_epoch=0, cache_salt="", kv_dtype=kv_dtype), ids, 4)
        assert (running.scheduler.cache.pool.lookup(keys[0] + b"\0") is not None) == found


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_dtype"):
        tiny.engine(kv_dtype="int3")

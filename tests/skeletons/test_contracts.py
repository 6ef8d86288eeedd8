"""The doors of the engine, each walked through once: overlap, ranks, KV groups, open inputs, replay."""

from __future__ import annotations

import random

import msgspec
import pytest

from motet.engine.cache.hashing import extend_chain, root_key
from motet.engine.types import Blob, EmbeddingSpan, StepPlan, Tokens

from .. import tiny


def mixed_requests() -> list[tiny.Request]:
    return [
        tiny.request(tiny.prompt(5 + 13 * seed, seed), max_tokens=20 + seed, temperature=0.7 * (seed % 2), seed=seed)
        for seed in range(5)
    ]


def test_depth_one_gives_the_same_tokens() -> None:
    requests = mixed_requests()
    plain = tiny.answers(tiny.engine(), requests)
    overlapped = tiny.engine(depth=1)
    deepest = 0
    for item in requests:
        overlapped.submit(item)
    events = []
    while overlapped.has_work():
        events += overlapped.step()
        deepest = max(deepest, overlapped.scheduler.num_in_flight)
    assert deepest == 1  # one plan stays in flight after each step
    assert [tiny.tokens([e for e in events if e.request_id == item.request_id]) for item in requests] == plain
    assert tiny.all_free(overlapped)
    overlapped.close()


def test_depth_one_stops_one_step_late_and_drops_it() -> None:
    item = tiny.request(tiny.prompt(8), max_tokens=30)
    plain = tiny.one(tiny.engine(), item)
    stop = plain[6]
    stopping = tiny.request(tiny.prompt(8), max_tokens=30, stop_token_ids=(stop,))
    overlapped = tiny.engine(depth=1)
    events = tiny.run(overlapped, [stopping])[stopping.request_id]
    assert tiny.tokens(events) == plain[: plain.index(stop)]
    assert events[-1].stop_token == stop
    assert tiny.all_free(overlapped)
    overlapped.close()


def test_two_ranks_over_gloo_equal_one() -> None:
    requests = mixed_requests()
    plain = tiny.answers(tiny.engine(), requests)
    ranked = tiny.engine(tp_size=2)
    try:
        assert tiny.answers(ranked, requests) == plain
        assert ranked.executor.runner.kvs[0].shape[2] == 1  # this rank holds one of the two kv heads
        drafted = tiny.engine(tp_size=2, speculation="ngram")
        try:
            assert tiny.answers(drafted, requests) == plain
        finally:
            drafted.close()
    finally:
        ranked.close()


def test_full_and_window_groups_match_transformers() -> None:
    import torch
    import transformers

    running = tiny.engine(tiny.windowed())
    assert [group.window for group in running.scheduler.cache.groups] == [0, 12]
    item = tiny.request(tiny.prompt(50), max_tokens=30, min_tokens=30, ignore_eos=False)
    answer = tiny.one(running, item)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny.windowed(), attn_implementation="eager")
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([item.prompt]), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
        )
    assert answer == expected[0, 50:].tolist()
    assert tiny.all_free(running)


def test_window_blocks_come_back_while_running() -> None:
    running = tiny.engine(tiny.windowed(), enable_prefix_caching=False)
    running.submit(tiny.request(tiny.prompt(40), max_tokens=60))
    pool = running.scheduler.cache.pool
    used = []
    while running.has_work():
        running.step()
        used.append(pool.num_usable - pool.num_free)
    # The full group grows to 25 blocks; the window group keeps the 12-token window and the block it starts in.
    assert max(used[2:-1]) <= 25 + 5
    assert tiny.all_free(running)


@pytest.mark.parametrize("path", [tiny.llama, tiny.windowed])
def test_open_request_fed_in_pieces_equals_fed_whole(path) -> None:  # type: ignore[no-untyped-def]
    ids = tiny.prompt(60)
    whole = tiny.one(tiny.engine(path()), tiny.request(ids, seed=3, temperature=0.8))
    for trial in range(4):
        rng = random.Random(trial)
        running = tiny.engine(path(), max_num_batched_tokens=16)
        cut = rng.randint(0, 5)
        item = tiny.request(ids[:cut], seed=3, temperature=0.8, open=True)
        running.submit(item)
        events = []
        while cut < len(ids):
            for _ in range(rng.randint(0, 3)):
                if running.has_work():
                    events += running.step()
            piece = rng.randint(1, 20)
            last = cut + piece >= len(ids) and rng.random() < 0.5
            running.append(item.request_id, ids[cut : cut + piece], last=last)
            cut += piece
        if not last:
            events += tiny.drain(running)
            running.append(item.request_id, [], last=True)
        events += tiny.drain(running)
        assert tiny.tokens(events) == whole, f"trial {trial}"
        assert tiny.all_free(running)


def test_prompt_embeddings_at_positions_equal_their_ids() -> None:
    running = tiny.engine()
    ids = tiny.prompt(30)
    plain = tiny.one(running, tiny.request(ids))
    import torch

    from motet.engine.blobs import to_blob

    rows = running.executor.runner.model.embed(torch.tensor(ids[9:17]))
    spans = [EmbeddingSpan(start=9, blob=to_blob(rows))]
    masked = ids[:9] + [0] * 8 + ids[17:]
    assert tiny.one(running, tiny.request(masked, embeddings=spans)) == plain
    # Same ids, other embeddings: never the other's cache entry.
    other = [EmbeddingSpan(start=9, blob=to_blob(rows.flip(0)))]
    assert tiny.one(running, tiny.request(masked, embeddings=other)) != plain
    again = tiny.run(running, [tiny.request(masked, embeddings=spans)])
    (events,) = again.values()
    assert tiny.tokens(events) == plain
    assert events[-1].usage.num_cached_tokens > 17
    open_item = tiny.request(ids[:9], open=True)
    running.submit(open_item)
    tiny.drain(running)
    running.append(open_item.request_id, [0] * 8, embeddings=spans)
    running.append(open_item.request_id, ids[17:], last=True)
    assert tiny.tokens(tiny.drain(running)) == plain


def test_recorded_plans_replayed_give_the_same_tokens() -> None:
    recorded = tiny.engine(num_blocks=30)
    requests = mixed_requests()
    tiny.answers(recorded, requests)
    assert recorded.scheduler.counters.num_preemptions > 0
    stream = [msgspec.msgpack.encode(plan) for plan in tiny.plans(recorded)]
    expected = [[(r.slot, r.token_ids) for r in result.results] for _, result in recorded.flight_recorder]
    fresh = tiny.engine(num_blocks=30).executor
    replayed = [fresh.launch(msgspec.msgpack.decode(data, type=StepPlan)).result() for data in stream]
    assert [[(r.slot, r.token_ids) for r in result.results] for result in replayed] == expected


def test_pooling_finishes_at_the_last_prompt_chunk() -> None:
    import torch

    running = tiny.engine(max_num_batched_tokens=8)
    ids = tiny.prompt(30)
    outputs = {}
    for pooling in ("last", "mean"):
        item = tiny.request(ids, task="pool", pooling=pooling)
        events = tiny.run(running, [item, tiny.request(tiny.prompt(9, 1))])[item.request_id]
        outputs[pooling] = torch.frombuffer(bytearray(events[0].output.data), dtype=torch.float32)
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny.llama()).model
    with torch.no_grad():
        hidden = reference(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(outputs["last"], hidden[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outputs["mean"], hidden.mean(0), atol=1e-4, rtol=1e-4)


def test_bad_embeddings_are_refused_and_harm_nobody() -> None:
    running = tiny.engine()
    good = tiny.request(tiny.prompt(9))
    running.submit(good)
    blob = Blob(dtype="float32", shape=(2, 16), data=b"\0" * 128)
    with pytest.raises(ValueError, match=r"expected shape \[n, 32\]"):
        running.submit(tiny.request(tiny.prompt(9), embeddings=[EmbeddingSpan(start=0, blob=blob)]))
    short = Blob(dtype="float32", shape=(2, 32), data=b"\0" * 8)
    with pytest.raises(ValueError, match="bytes"):
        running.submit(tiny.request(tiny.prompt(9), embeddings=[EmbeddingSpan(start=0, blob=short)]))
    events = tiny.drain(running)
    assert sum(isinstance(event, Tokens) for event in events) == 16


def test_exported_pages_serve_another_cache() -> None:
    """Blocks moved by canonical page into another engine's cache give the same continuation there."""
    ids = tiny.prompt(20)
    first, second = tiny.engine(), tiny.engine()
    expected = tiny.one(first, tiny.request(ids))
    source, target = first.executor.runner, second.executor.runner
    keys: list[bytes] = []
    extend_chain(keys, root_key(model=first.info.model, weight_epoch=0, cache_salt=""), ids, 4)
    from_pool, to_pool = first.scheduler.cache.pool, second.scheduler.cache.pool
    for key in keys[:4]:
        block = to_pool.allocate(1)[0]
        held = from_pool.lookup(key + b"\0")
        target.import_page(block, source.export_page(held), digest=b"d", expected=b"d")
        to_pool.publish(block, key + b"\0")
        to_pool.release([block])
    item = tiny.request(ids)
    events = tiny.run(second, [item])[item.request_id]
    assert tiny.tokens(events) == expected
    assert events[-1].usage.num_cached_tokens == 16
    with pytest.raises(ValueError, match="another layout"):
        target.import_page(1, source.export_page(1), digest=b"x", expected=b"d")

"""Padded decode steps: the hazards of CUDA graphs, each poisoned, on a CPU where a replay is the call itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from motet.engine.graphs import BatchKey, PaddedInputs, StepGraphs, as_it_is, padded_sizes
from motet.kernels.attention import PagedBatch
from motet.models.build import random_model

from .. import tiny

BLOCK, NUM_BLOCKS, MAX_BLOCKS = 4, 40, 6
DUMMY = NUM_BLOCKS  # one page more than the pool hands out
SIZES = (1, 2, 4, 8)
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


class Rig:
    """A random decoder, its cache with something in every page but the null and the dummy one, and padded steps."""

    def __init__(self, record: Callable = as_it_is, dtype: torch.dtype = torch.float32) -> None:  # type: ignore[type-arg]
        self.model = random_model(CONFIG, dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        self.kvs = [torch.randn(NUM_BLOCKS + 1, 2, 2, BLOCK, 8, generator=generator).to(dtype) for _ in range(2)]
        for kv in self.kvs:
            kv[0] = kv[DUMMY] = 0
        self.seen: list[PagedBatch] = []
        self.num_real = -1  # rows beyond get NaN instead of their embedding; -1: none
        self.inputs = PaddedInputs(
            SIZES[-1], num_groups=1, max_blocks=MAX_BLOCKS, block_size=BLOCK, dummy_block=DUMMY, max_kv_len=24,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.graphs = StepGraphs(
            self.step, self.inputs, sizes=SIZES, hidden_size=32, dtype=dtype, device=torch.device("cpu"), record=record
        )

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        self.seen.append(batch)
        hidden = self.model.embed(ids)
        if self.num_real >= 0:
            hidden[self.num_real :] = torch.nan
        return self.model.forward(hidden, batch, self.kvs, [0, 0])

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        hidden = self.graphs.run(ids, batch)
        assert hidden is not None
        return hidden.clone()


def decode(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, PagedBatch]:
    """Ids and batch of sequences of these lengths, this step's token included, on pages of their own."""
    n = len(lengths)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(NUM_BLOCKS - 1, generator=generator)[: n * 3] + 1
    table = torch.zeros(n, 3, dtype=torch.int32)
    table[:] = order.view(n, 3)
    kv_lens = torch.tensor(lengths)
    position = kv_lens - 1
    slots = table.gather(1, (position // BLOCK)[:, None])[:, 0].long() * BLOCK + position % BLOCK
    batch = PagedBatch(
        seq=torch.arange(n), position=position, slots=(slots,), num_visible=kv_lens, block_tables=(table,),
        kv_lens=kv_lens, row_starts=torch.arange(n + 1), mark="decode", max_kv_len=max(lengths), block_size=BLOCK,
        row_starts_list=tuple(range(n + 1)), kv_lens_list=tuple(lengths),
    )  # fmt: skip
    return torch.randint(0, 64, (n,), generator=generator), batch


def test_sizes_reach_the_largest_and_no_further() -> None:
    assert padded_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert padded_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert padded_sizes(1) == (1,)
    sizes = padded_sizes(512)
    assert sizes[-1] == 512 and all(b - a <= a for a, b in zip(sizes, sizes[1:]))


def test_padding_changes_nothing_for_the_real_rows() -> None:
    rig = Rig()
    rig.graphs.capture()
    ids, batch = decode([9, 1, 12, 5, 7])
    before = [kv.clone() for kv in rig.kvs]
    padded = rig.run(ids, batch)
    after = [kv.clone() for kv in rig.kvs]
    for kv, old in zip(rig.kvs, before, strict=True):
        kv.copy_(old)
    eager = rig.step(ids, batch)
    torch.testing.assert_close(padded, eager, rtol=2e-4, atol=2e-5)  # another row count: BLAS may sum otherwise
    for kv, padded_kv in zip(rig.kvs, after, strict=True):
        torch.testing.assert_close(padded_kv, kv, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poisoned_padding_leaves_real_rows_bit_equal(dtype: torch.dtype) -> None:
    ids, batch = decode([9, 1, 12, 5, 7])
    clean = Rig(dtype=dtype)
    clean.graphs.capture()
    expected = clean.run(ids, batch)
    poisoned = Rig(dtype=dtype)
    poisoned.graphs.capture()
    # A full step leaves its ids, slots and pages behind; the padding's own page and hidden rows are NaN.
    with torch.inference_mode():
        poisoned.run(*decode([3, 4, 5, 6, 7, 8, 9, 10], seed=9))
    for kv, other in zip(poisoned.kvs, Rig(dtype=dtype).kvs, strict=True):
        kv.copy_(other)
        kv[DUMMY] = torch.nan
    poisoned.num_real = len(ids)
    assert torch.equal(poisoned.run(ids, batch), expected)
    for kv, other in zip(poisoned.kvs, clean.kvs, strict=True):
        assert torch.equal(kv[:DUMMY], other[:DUMMY])


def test_padding_stores_nothing_anywhere() -> None:
    rig = Rig()
    rig.graphs.capture()
    before = [kv.clone() for kv in rig.kvs]
    ids, batch = decode([9, 1, 12])
    rig.num_real = 3
    rig.run(ids, batch)
    written = {(int(slot) // BLOCK, int(slot) % BLOCK) for slot in batch.slots[0]}
    for kv, old in zip(rig.kvs, before, strict=True):
        changed = (kv != old).any(dim=(1, 2, 4)).nonzero()
        assert {tuple(pair) for pair in changed.tolist()} == written
        assert not kv[0].any() and not kv[DUMMY].any()  # the null block, and the padding's own


def test_recording_itself_stores_nothing() -> None:
    rig = Rig()
    before = [kv.clone() for kv in rig.kvs]
    rig.graphs.capture()
    assert all(torch.equal(kv, old) for kv, old in zip(rig.kvs, before, strict=True))


def test_no_row_ever_sees_an_empty_context() -> None:
    rig = Rig()
    calls: list[Callable[[], object]] = []

    def record(call: Callable[[], object]) -> Callable[[], object]:
        calls.append(call)
        call()
        return call

    rig.graphs._record = record
    rig.graphs.capture()
    shortest = [int(batch.kv_lens.min()) for batch in rig.seen]
    for lengths in ([1], [2, 3, 4], [5] * 7, [1, 2], [6]):
        rig.seen.clear()
        rig.run(*decode(lengths))
        (batch,) = rig.seen
        n = len(lengths)
        shortest.append(int(batch.kv_lens.min()))
        assert batch.kv_lens.tolist() == batch.num_visible.tolist() == lengths + [1] * (len(batch.seq) - n)
        assert batch.slots[0].tolist()[n:] == [-1] * (len(batch.seq) - n)
        assert (batch.block_tables[0][n:] == DUMMY).all() and not batch.position[n:].any()
    assert min(shortest) == 1


def test_recorded_largest_first_and_looked_up_by_size() -> None:
    order: list[int] = []

    def record(call: Callable[[], object]) -> Callable[[], object]:
        call()
        order.append(rig.seen[-1].seq.shape[0])
        return call

    rig = Rig(record)
    assert rig.graphs.run(*decode([3])) is None  # nothing is recorded yet
    rig.graphs.capture()
    assert order == [8, 4, 2, 1]
    keys = [rig.graphs.key(decode([4] * n)[1]) for n in (1, 2, 3, 5, 8, 9)]
    assert keys == [*(BatchKey(num_rows=n) for n in (1, 2, 4, 8, 8)), None]


@pytest.mark.parametrize("mark", ["mixed", "prefill"])
def test_other_steps_run_as_they_come(mark: str) -> None:
    from dataclasses import replace

    rig = Rig()
    rig.graphs.capture()
    ids, batch = decode([4, 5])
    assert rig.graphs.run(ids, replace(batch, mark=mark)) is None
    assert rig.graphs.run(ids, replace(batch, position=batch.position.expand(3, -1))) is None


def test_what_cannot_be_recorded_runs_eagerly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(call: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    rig = Rig(refuse)
    with caplog.at_level(logging.WARNING, logger="motet.engine"):
        rig.graphs.capture()
        for _ in range(3):
            assert rig.graphs.run(*decode([3])) is None
    assert len(caplog.records) == 1 and "capturing" in caplog.text and "capturing" in rig.graphs.why_not


def test_an_engine_that_pads_gives_the_same_tokens() -> None:
    requests = [
        tiny.request(tiny.prompt(5 + 9 * seed, seed), max_tokens=12 + 2 * seed, temperature=0.7 * (seed % 2), seed=seed)
        for seed in range(5)
    ]
    for path in (tiny.llama(), tiny.windowed()):
        plain = tiny.answers(tiny.engine(path), requests)
        padded = tiny.engine(path, graphs="padded")
        assert padded.executor.runner.graphs is not None
        assert tiny.answers(padded, requests) == plain
        assert tiny.all_free(padded)
        for page in padded.executor.runner.pages:
            assert not page[-1].any()  # the padding's own

"""A decoder split over ranks equals the whole one: tensor, expert and layer shards, two ranks as two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.models.build import build_model, random_model
from motet.models.parameters import RandomSource, parameter_shapes
from motet.models.spec import Shard

from .paged import PagedSequences
from .test_decoder import CASES, TINY, random_ids


class ThreadComm:
    """Collectives among threads of one process: put, wait for all, read, wait before the next round."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._board = board
        self._barrier = barrier

    def _exchange(self, x: Any) -> list[Any]:
        self._board[self._rank] = x
        self._barrier.wait(timeout=30)
        parts = list(self._board)
        self._barrier.wait(timeout=30)
        return parts

    def all_reduce(self, x: Any) -> Any:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Any, dim: int) -> Any:
        return torch.cat(self._exchange(x), dim)


def run_ranks(size: int, run: Callable[[int, ThreadComm], torch.Tensor]) -> list[torch.Tensor]:
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(rank, ThreadComm(rank, board, barrier)), range(size)))


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    sequences = PagedSequences(model.kv_specs(), 1, len(ids))
    return torch.cat([sequences.run(model, [(0, part)])[0] for part in (ids[:11], ids[11:12], ids[12:])])


@pytest.mark.parametrize("case", ["llama", "llama3_rope", "llama_biases", "qwen3", "gemma2", "phi", "phi3", "mixtral"])
def test_two_tensor_shards_equal_the_whole(case: str) -> None:
    """67 ids over two ranks: the last slice of the vocabulary is shorter. llama3_rope: one kv head on both ranks."""
    settings, ids = TINY | CASES[case], random_ids(20)
    whole = logits_of(random_model(settings, seed=3), ids)

    def run(rank: int, comm: ThreadComm) -> torch.Tensor:
        return logits_of(random_model(settings, seed=3, shard=Shard(tp_rank=rank, tp_size=2, comm=comm)), ids)

    for logits in run_ranks(2, run):
        torch.testing.assert_close(logits, whole, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_two_expert_shards_equal_the_whole(tp_size: int) -> None:
    settings, ids = TINY | CASES["mixtral"], random_ids(20)
    whole = logits_of(random_model(settings, seed=3), ids)

    def run(rank: int, comm: ThreadComm) -> torch.Tensor:
        shard = Shard(tp_rank=rank % tp_size, tp_size=tp_size, ep_rank=rank, ep_size=2, comm=comm)
        model = random_model(settings, seed=3, shard=shard)
        return logits_of(model, ids)

    for logits in run_ranks(2, run):
        torch.testing.assert_close(logits, whole, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_layer_shards_hand_the_stream_on(case: str) -> None:
    settings, ids = TINY | CASES[case], torch.tensor(random_ids(13))
    whole = random_model(settings)
    first, last = (random_model(settings, shard=Shard(layers=layers)) for layers in ((0, 2), (2, 3)))
    with torch.inference_mode():
        sequences = PagedSequences(whole.kv_specs(), 1, 13)
        expected = whole.forward(whole.embed(ids), sequences.batch([(0, 13)]), sequences.kvs, sequences.groups)
        hidden = whole.embed(ids)
        for part in (first, last):
            sequences = PagedSequences(part.kv_specs(), 1, 13)
            hidden = part.forward(hidden, sequences.batch([(0, 13)]), sequences.kvs, sequences.groups)
        torch.testing.assert_close(hidden, expected)
        torch.testing.assert_close(last.logits(hidden), whole.logits(expected))


class SliceRecorder(RandomSource):
    """Remembers how many numbers of each parameter were asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: dict[str, int] = {}

    def get(self, name: str) -> torch.Tensor:
        value = super().get(name)
        self.asked[name] = value.numel()
        return value

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> torch.Tensor:
        value = super().get_slice(name, dim, lo, hi)
        self.asked[name] = value.numel()
        return value


def test_a_shard_reads_only_its_slices() -> None:
    settings = TINY | CASES["llama"]
    shapes = parameter_shapes(random_model(settings).config)
    source = SliceRecorder(shapes, 0)
    build_model(settings, source, shard=Shard(tp_rank=1, tp_size=2))
    for name, shape in shapes.items():
        if len(shape) == 2 and "embed" not in name:
            assert source.asked[name] * 2 == shape[0] * shape[1], name


def test_a_split_that_does_not_come_out_is_refused() -> None:
    shard = Shard(tp_rank=0, tp_size=3)
    with pytest.raises(ModelLoadError, match=r"num_attention_heads.*3.*4"):
        build_model(TINY | CASES["llama"], RandomSource({}, 0), shard=shard)

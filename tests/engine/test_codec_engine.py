"""The codec engine: any pushes, any batch mates, any slots, the same sound; and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from motet.engine.codec_engine import CodecEngine, rounds
from motet.engine.errors import DuplicateRequest, InvalidRequest, Overloaded
from motet.models.parameters import TensorSource
from motet.models.snac import Snac
from motet.models.snac_config import SnacConfig

CONFIG = {
    "sampling_rate": 24000,
    "latent_dim": 12,
    "decoder_dim": 64,
    "decoder_rates": [4, 2],
    "codebook_size": 32,
    "codebook_dim": 4,
    "vq_strides": [2, 1],
    "attn_window_size": None,
    "noise": True,
    "depthwise": True,
}
Frames = NDArray[np.int64]


@pytest.fixture(scope="module")
def codec() -> Snac:
    config = SnacConfig.read(CONFIG)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in config.shapes(encoder=False).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("alpha"):
            tensors[name] = 1.0 + 0.2 * noise
        else:
            tensors[name] = noise * (0.3 if "codebook" in name else 0.1)
    made = Snac(config, TensorSource(tensors))
    loud = whole(made, frames_of(made, 30, 0), 0)
    assert 0.05 < loud.std() < 0.6  # sound that can be wrong
    return made


def frames_of(codec: Snac, num_frames: int, seed: int) -> Frames:
    shape = (num_frames, codec.config.codes_per_frame)
    return np.random.default_rng(seed).integers(0, codec.config.codebook_size, shape)


def whole(codec: Snac, frames: Frames, seed: int) -> NDArray[np.float32]:
    levels = torch.from_numpy(frames)[None].split(codec.config.codes_per_level, 2)
    pcm: NDArray[np.float32] = codec.decode([level.flatten(1) for level in levels], seeds=(seed,))[0].numpy()
    return pcm


def spoken(engine: CodecEngine, id: str) -> tuple[NDArray[np.float32], bool]:
    """All that is left of one stream, alone."""
    pieces = []
    while True:
        got = engine.step([id])
        pieces += [piece.pcm for piece in got]
        if not got or got[0].done:
            return np.concatenate([np.zeros(0, np.float32), *pieces]), bool(got)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 4), min_size=1, max_size=6)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, 16]),
    st.integers(1, 7),
)
@settings(max_examples=25, deadline=None)
def test_any_pushes_in_any_company_give_the_whole(
    codec: Snac, streams: list[tuple[int, list[int]]], together: int, most: int
) -> None:
    """Stream i opens at its step and pushes these many frames, one push a step."""
    engine = CodecEngine(codec, max_streams=5, most_frames=most, together=together)
    made: dict[str, list[NDArray[np.float32]]] = {}
    done: set[str] = set()
    inputs = {f"s{i}": frames_of(codec, sum(pushes), i) for i, (_, pushes) in enumerate(streams)}
    for step in range(80):
        for i, (start, pushes) in enumerate(streams):
            id, nth = f"s{i}", step - start
            if nth == 0:
                engine.open(id, seed=i)
                made[id] = []
            if 0 <= nth < len(pushes):
                at = sum(pushes[:nth])
                engine.push(id, inputs[id][at : at + pushes[nth]], last=nth == len(pushes) - 1)
        for piece in engine.step():
            made[piece.id].append(piece.pcm)
            if piece.done:
                assert piece.id not in done and engine.pending(piece.id) == 0
                done.add(piece.id)
                engine.close(piece.id)
    assert len(done) == len(streams) and engine.num_open == 0
    for i, id in enumerate(inputs):
        want = whole(codec, inputs[id], i) if len(inputs[id]) else np.zeros(0, np.float32)
        np.testing.assert_allclose(np.concatenate(made[id]), want, atol=1e-4)


def test_a_seed_is_the_sound_and_a_slot_is_not(codec: Snac) -> None:
    engine, frames = CodecEngine(codec, max_streams=2), frames_of(codec, 6, 0)
    heard = []
    for seed in (1, 1, 2):
        engine.open("a", seed)
        engine.push("a", frames, last=True)
        heard.append(spoken(engine, "a")[0])
        engine.close("a")
        engine.open("other")  # moves the free slots on, and leaves its state behind
        engine.push("other", frames_of(codec, 3, 1))
        engine.step()
        engine.close("other")
    assert np.array_equal(heard[0], heard[1]) and np.abs(heard[0] - heard[2]).max() > 1e-3
    assert heard[0].dtype == np.float32 and len(heard[0]) == 6 * codec.config.frame_samples


def test_a_step_is_bounded_and_takes_whom_it_is_told(codec: Snac) -> None:
    engine = CodecEngine(codec, max_streams=3, most_frames=4)
    for id in "ab":
        engine.open(id)
        engine.push(id, frames_of(codec, 10, 0))
    assert [piece.id for piece in engine.step(["b"])] == ["b"]
    assert (engine.pending("a"), engine.pending("b")) == (10, 6)
    assert [len(engine.step()) for _ in range(4)] == [2, 2, 1, 0]
    assert engine.counters["steps"] == 4 and engine.counters["frames"] == 20
    engine.push("a", np.zeros((0, 3), np.int64), last=True)
    assert engine.pending("a") == codec.config.flush_frames
    pcm, done = spoken(engine, "a")
    assert done and len(pcm) == codec.config.lookahead and engine.pending("b") == 0


def test_the_end_may_be_said_twice_but_nothing_follows_it(codec: Snac) -> None:
    engine, none = CodecEngine(codec, max_streams=1), np.zeros((0, 3), np.int64)
    engine.open("a")
    engine.push("a", none, last=True)
    engine.push("a", none, last=True)
    (piece,) = engine.step()
    assert piece.done and len(piece.pcm) == 0
    with pytest.raises(InvalidRequest, match="last frame"):
        engine.push("a", frames_of(codec, 1, 0))


def test_refusals(codec: Snac) -> None:
    engine = CodecEngine(codec, max_streams=1)
    engine.open("a")
    with pytest.raises(DuplicateRequest):
        engine.open("a")
    with pytest.raises(Overloaded, match="all 1 streams"):
        engine.open("b")
    for wrong in (np.zeros((2, 4), int), np.zeros(3, int), np.zeros((2, 3)), [[0, 1, 32]], [[-1, 0, 0]]):
        with pytest.raises(InvalidRequest):
            engine.push("a", wrong)
    assert engine.pending("a") == 0 and engine.num_open == 1
    engine.push("a", [[0, 1, 31]])
    engine.close("a")  # in its midst
    engine.open("b")
    assert engine.pending("b") == 0 and engine.step() == []


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 20))
def test_rounds_take_every_frame_once_and_stay_small(waiting: list[int], together: int) -> None:
    taken = [0] * len(waiting)
    for group, count in rounds(waiting, together):
        assert count > 0 and len(set(group)) == len(group) and len(group) * count <= together
        for at in group:
            taken[at] += count
    assert taken == waiting


def test_rounds_put_streams_before_frames() -> None:
    assert list(rounds([4] * 8, 16)) == [(list(range(8)), 2)] * 2
    assert list(rounds([3, 0, 1], 16)) == [([0, 2], 1), ([0], 2)]

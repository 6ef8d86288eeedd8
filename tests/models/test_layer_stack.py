"""All layers in one C++ call give the numbers of the layers one by one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from motet.kernels.attention import row_width
from motet.kernels.dispatch import cpu_ops
from motet.models.build import random_model
from motet.models.decoder import Decoder
from motet.models.layer_stack import PARTS, make_stack

from .paged import PagedSequences

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="needs the C++ kernels")

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},  # biases on QKV
    "qwen3": {"model_type": "qwen3", "head_dim": 32},  # norms on q and k; heads wider than the hidden size
    "mistral": {"model_type": "mistral", "sliding_window": 9},
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make(family: str, quantize: Any = "int8", **changes: Any) -> Decoder:
    return random_model(
        {**SMALL, **FAMILIES[family], **changes}, seed=3, dtype=torch.bfloat16, device="cpu", quantize=quantize
    )


def both(
    model: Decoder, steps: list[list[tuple[int, int]]], kv_dtype: torch.dtype = torch.bfloat16
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden rows of each step, and the caches after them: with the stack, and then without it."""
    stack, results = model.stack, []
    calls = 0
    if stack is not None:
        forward = stack.forward

        def counted(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return forward(*args)

        stack.forward = counted  # type: ignore[method-assign]
    for chosen in (stack, None):
        model.stack = chosen
        paged = PagedSequences(model.kv_specs(), 3, 96, dtype=torch.bfloat16)
        if kv_dtype is torch.int8:  # the bytes of a NaN's scale would do as well as any others
            paged.kvs = [
                torch.full((*kv.shape[:-1], row_width(kv.shape[-1], kv_dtype)), -1, dtype=kv_dtype) for kv in paged.kvs
            ]
        draw = torch.Generator().manual_seed(0)
        hidden = []
        for chunks in steps:
            ids = torch.randint(0, 96, (sum(count for _, count in chunks),), generator=draw)
            hidden.append(model.forward(model.embed(ids), paged.batch(chunks), paged.kvs, paged.groups))
        results.append((hidden, paged.kvs))
    model.stack = stack
    assert calls == (len(steps) if stack is not None else 0)
    (fused, fused_kvs), (plain, plain_kvs) = results
    return [*fused, *fused_kvs], [*plain, *plain_kvs]


STEPS = [[(0, 7), (2, 1)], [(1, 5), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 1)]]


@pytest.mark.parametrize("quantize", ["int8", "int4", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_equals_layer_by_layer(family: str, quantize: Any) -> None:
    model = make(family, quantize)
    if model.stack is None:
        assert quantize is None, "only where the CPU cannot multiply bf16 are unquantized layers called one by one"
        pytest.skip("this CPU multiplies bf16 in torch")
    fused, plain = both(model, STEPS)
    assert fused[0].dtype == torch.bfloat16
    for one, other in zip(fused, plain, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))  # NaN in unused slots included


@pytest.mark.parametrize("family", FAMILIES)
def test_over_an_int8_cache_too(family: str) -> None:
    fused, plain = both(make(family), STEPS, torch.int8)
    assert fused[-1].dtype == torch.int8
    assert all(
        torch.equal(one.view(torch.int8), other.view(torch.int8)) for one, other in zip(fused, plain, strict=True)
    )


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_may_pass_the_layers_in_parts(family: str, kv_dtype: torch.dtype) -> None:
    model = make(family)
    results = []
    for cuts in ([0, 3], [0, 1, 3], [0, 1, 2, 3]):
        paged = PagedSequences(model.kv_specs(), 1, 96, dtype=torch.bfloat16)
        if kv_dtype is torch.int8:
            paged.kvs = [
                torch.zeros((*kv.shape[:-1], row_width(kv.shape[-1], kv_dtype)), dtype=kv_dtype) for kv in paged.kvs
            ]
        hidden = torch.empty(0)
        for first in (0, 7):  # the second chunk looks back on the first
            hidden = model.embed(torch.arange(first, first + 7))
            batch = paged.batch([(0, 7)])
            stream = torch.full((7, 64), float("nan"))  # layer 0 does not read it
            for layers in zip(cuts, cuts[1:]):
                hidden = model.forward_part(hidden, batch, paged.kvs, paged.groups, layers=layers, stream=stream)
        results.append([hidden, *paged.kvs])
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert torch.equal(one.nan_to_num(9.0), same.nan_to_num(9.0))


@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (-1, 2), (0, 4)])
def test_parts_that_are_none_are_refused(layers: tuple[int, int]) -> None:
    model = make("llama")
    paged = PagedSequences(model.kv_specs(), 1, 64, dtype=torch.bfloat16)
    hidden, batch = model.embed(torch.arange(5)), paged.batch([(0, 5)])
    with pytest.raises(RuntimeError, match=f"layers {layers[0]} to {layers[1]} of 3"):
        model.forward_part(hidden, batch, paged.kvs, paged.groups, layers=layers, stream=torch.zeros(5, 64))
    with pytest.raises(RuntimeError, match="contiguous fp32 stream"):
        model.forward_part(hidden, batch, paged.kvs, paged.groups, layers=(0, 1), stream=torch.zeros(4, 64))


def test_matrices_of_unlike_formats_lie_side_by_side() -> None:
    model = make("llama")
    halves = [
        make("llama", quantize, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        for quantize in ("int8", "int4")
    ]
    for block, left, right in zip(model.blocks, halves[0].blocks, halves[1].blocks, strict=True):
        block.attention.qkv.weights = (*left.attention.qkv.weights, *right.attention.qkv.weights)
    assert [w.format for w in model.blocks[0].attention.qkv.weights] == ["int8", "int4"]
    model.stack = make_stack(model)
    fused, plain = both(model, STEPS)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(fused, plain, strict=True))
    model.blocks[1].attention.qkv.weights = halves[0].blocks[1].attention.qkv.weights
    with pytest.raises(RuntimeError, match="layer 1 do not fit 64 features"):
        make_stack(model)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},  # four norms
        {"model_type": "phi", "partial_rotary_factor": 0.5},  # parallel block
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1},
        {"hidden_act": "gelu"},
    ],
    ids=["sandwich", "parallel", "experts", "activation"],
)
def test_other_shapes_go_layer_by_layer(change: dict[str, Any]) -> None:
    assert make("llama", **change).stack is None


def test_other_dtypes_and_wishes_go_layer_by_layer() -> None:
    assert random_model({**SMALL, **FAMILIES["llama"]}, dtype=torch.float32).stack is None
    model = make("llama")
    assert model.stack is not None
    paged = PagedSequences(model.kv_specs(), 1, 64, dtype=torch.bfloat16)
    ids = torch.arange(5)
    aux: Callable[..., Any] = model.forward
    hidden, streams = aux(model.embed(ids), paged.batch([(0, 5)]), paged.kvs, paged.groups, aux_hidden=(1,))
    again = PagedSequences(model.kv_specs(), 1, 64, dtype=torch.bfloat16)
    assert torch.equal(hidden, model.forward(model.embed(ids), again.batch([(0, 5)]), again.kvs, again.groups))
    assert streams[1].shape == (5, 64)
    wide = [torch.zeros_like(kv, dtype=torch.float32) for kv in paged.kvs]
    assert not model.stack.takes(hidden, wide)


def test_it_measures_itself_when_asked() -> None:
    model = make("llama")
    assert model.stack is not None
    seconds: dict[str, float] = {}
    model.stack.measure(lambda part, spent: seconds.__setitem__(part, seconds.get(part, 0.0) + spent))
    paged = PagedSequences(model.kv_specs(), 1, 64, dtype=torch.bfloat16)
    model.forward(model.embed(torch.arange(5)), paged.batch([(0, 5)]), paged.kvs, paged.groups)
    assert set(seconds) == set(PARTS) and all(spent > 0 for spent in seconds.values())


def test_a_batch_that_does_not_fit_is_refused() -> None:
    model = make("llama")
    assert model.stack is not None
    paged = PagedSequences(model.kv_specs(), 1, 64, dtype=torch.bfloat16)
    batch = paged.batch([(0, 5)])
    with pytest.raises(RuntimeError, match="3 layers, 2 caches"):
        model.stack.forward(model.embed(torch.arange(5)), batch, paged.kvs[:2], paged.groups, [])
    with pytest.raises(RuntimeError, match="names group 0 and rotary 0"):
        model.stack.forward(model.embed(torch.arange(5)), batch, paged.kvs, paged.groups, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_many_rows_which_threads_take_in_pieces_of_their_own(family: str) -> None:
    """192 rows and more a step: pieces of about 64 go from matrix to matrix, on one thread or several."""
    model = make(family)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            fused, plain = both(model, [[(0, 70), (1, 62), (2, 63)], [(2, 1), (0, 3)]])
            for ours, theirs in zip(fused, plain, strict=True):
                assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))
    finally:
        torch.set_num_threads(threads)

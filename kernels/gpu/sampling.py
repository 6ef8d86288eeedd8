"""Triton: ids from logits: temperature, seeded Gumbel noise and argmax in one pass, without a copy of the logits.

Filters (min_p, top_k, top_p) run before it in torch, on the device and without a word from the host. The noise is that
of kernels/sampling.py, hash for hash; its logarithms may differ in the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sampling import MASK32, SamplingRows, filter_logits

CHUNK = 4096  # ids of one program: 128k ids make 32 programs, so that one row alone fills a quarter of the GPU
NONE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, head, ids):
    """Noise of `ids` uint32 for a row's key; see noise_keys and gumbel in kernels/sampling.py."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = _mix(low ^ _mix((position & 0xFFFFFFFF).to(tl.uint32) ^ 0x243F6A88))
    second = _mix(high ^ first ^ head.to(tl.uint32))
    first = _mix(first ^ second ^ 0x85A308D3)
    bits = _mix(_mix(ids * 0x9E3779B1 ^ first) ^ second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # -log(1 - u): small values of u decide and must keep their digits, so below a half it is the series
    # 2 artanh(s) with s = u / (2 - u) <= 1/3, whose next term is 1e-8 of the sum.
    s = uniform / (2.0 - uniform)
    t = s * s
    series = 1.0 / 13
    series = series * t + 1.0 / 11
    series = series * t + 1.0 / 9
    series = series * t + 1.0 / 7
    series = series * t + 1.0 / 5
    series = series * t + 1.0 / 3
    series = 2.0 * s * (series * t + 1.0)
    exponential = tl.where(uniform < 0.5, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _best(values, ids):
    """(largest value, its lowest id); NaN counts as the largest. Lanes that do not exist hold -inf and id NONE."""
    values = tl.where(values == values, values, float("inf"))
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, NONE), 0)


@triton.jit(do_not_specialize=["head"])
def _sample_kernel(
    logits_ptr, row_stride, temperature_ptr, seed_ptr, position_ptr, head, value_ptr, id_ptr, vocab, num_chunks,
    RANDOM: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best of one row's CHUNK ids."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf"))
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            if not SCALED:
                values = values / temperature
            seed = tl.load(seed_ptr + row)
            values += _gumbel(seed, tl.load(position_ptr + row), head, ids.to(tl.uint32))
    best, where = _best(values, tl.where(ids < vocab, ids, NONE))
    tl.store(value_ptr + row * num_chunks + chunk, best)
    tl.store(id_ptr + row * num_chunks + chunk, where)


@triton.jit
def _choose_kernel(value_ptr, id_ptr, out_ptr, num_chunks, BLOCK: tl.constexpr):
    """The best of a row's chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    mask = chunks < num_chunks
    values = tl.load(value_ptr + row * num_chunks + chunks, mask=mask, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_chunks + chunks, mask=mask, other=2147483647)
    _, where = _best(values, ids)
    tl.store(out_ptr + row, where.to(tl.int64))


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`kernels.sampling.sample`. Nothing waits for the device."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    scaled = rows.any_random and (rows.any_top_k or rows.any_top_p or rows.any_min_p)
    if scaled:
        logits = filter_logits(logits / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None], rows)
    num_chunks = triton.cdiv(vocab, CHUNK)
    values = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    head = rows.head * 0x9E3779B1 & MASK32
    head -= (head >> 31) << 32  # the same bits as an int32
    _sample_kernel[(num_rows, num_chunks)](
        logits, logits.stride(0), rows.temperature, rows.noise_seed, rows.noise_position, head, values,
        ids, vocab, num_chunks, RANDOM=rows.any_random, SCALED=scaled, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](values, ids, out, num_chunks, BLOCK=triton.next_power_of_2(num_chunks), num_warps=1)
    return out

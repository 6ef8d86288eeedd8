"""From logits to ids: temperature, filters, seeded noise, log probabilities, and the row-wise edits of logits.

It knows rows, not requests. Letters: N rows, V vocabulary.

A random row takes argmax(logit / temperature + gumbel) over the ids that its filters keep: a draw from the softmax.
The noise of an id is a pure function of (seed, position, head, id), so it depends neither on the row's place, nor on
its batch mates, nor on speculation or preemption.

Filters work on the distribution after temperature and in this order, each on what the ones before kept: min_p (ids with
at least min_p times the best id's probability), top_k (the k best), top_p (the smallest set of best ids whose
renormalised mass reaches p). "Best" is by value, equal values by lower id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .dispatch import cpu_ops, gpu_ops

MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How each of N rows is sampled; tensors live on the logits' device. The flags are host-known: nothing syncs."""

    temperature: torch.Tensor  # [N] fp32; 0 = greedy
    top_k: torch.Tensor  # [N] int64; <= 0 = off
    top_p: torch.Tensor  # [N] fp32; >= 1 = off
    min_p: torch.Tensor  # [N] fp32; 0 = off
    noise_seed: torch.Tensor  # [N] int64
    noise_position: torch.Tensor  # [N] int64
    head: int = 0  # codebook of a multi-head model
    any_random: bool = True
    any_top_k: bool = True
    any_top_p: bool = True
    any_min_p: bool = True


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """ids [N] int64 for logits [N, V] fp32. Greedy rows: argmax, equal values give the lowest id."""
    if logits.is_cpu and (ops := cpu_ops()) is not None and ops.can_sample(logits):
        if not rows.any_random:
            return ops.argmax(logits)  # type: ignore[no-any-return]
        seed, position, head = rows.noise_seed, rows.noise_position, rows.head
        return ops.sample(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, seed, position, head)  # type: ignore[no-any-return]
    if (gpu := gpu_ops(logits.device.type)) is not None and gpu.can_sample(logits):
        return gpu.sample(logits, rows)  # type: ignore[no-any-return]
    return sample_reference(logits, rows)


def sample_reference(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Plain torch twin of `sample`."""
    greedy = _lowest_argmax(logits)
    if not rows.any_random:
        return greedy
    random = rows.temperature > 0
    scaled = logits / torch.where(random, rows.temperature, 1.0)[:, None]
    if rows.any_top_k or rows.any_top_p or rows.any_min_p:
        scaled = filter_logits(scaled, rows)
    key = noise_keys(rows.noise_seed, rows.noise_position, rows.head)
    return torch.where(random, _lowest_argmax(scaled + gumbel(key, logits.shape[1])), greedy)


def _lowest_argmax(values: torch.Tensor) -> torch.Tensor:
    """argmax over the last dimension; torch does not promise which of equal values wins, we do: the lowest id."""
    best = values.max(dim=-1, keepdim=True).values
    ids = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == best, ids, values.shape[-1]).min(dim=-1).values.clamp(max=values.shape[-1] - 1)


def filter_logits(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits after temperature [N, V] fp32, with -inf where a filter drops the id."""
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights = torch.exp(values - values[:, :1])  # relative to the best id's probability
    keep = weights >= rows.min_p[:, None]
    rank = torch.arange(values.shape[1], device=values.device)
    keep &= (rank < rows.top_k[:, None]) | (rows.top_k[:, None] <= 0)
    weights = torch.where(keep, weights, 0.0).double()
    before = weights.cumsum(-1) - weights
    keep &= (before < rows.top_p[:, None].double() * weights.sum(-1, keepdim=True)) | (rows.top_p[:, None] >= 1)
    keep[:, 0] = True
    return torch.full_like(scaled, -torch.inf).scatter(1, ids, torch.where(keep, values, -torch.inf))


# ------------------------------------------------------------------------------------------------------------- noise


def noise_keys(seed: torch.Tensor, position: torch.Tensor, head: int) -> torch.Tensor:
    """[N] int64 key of each row's noise: two 32-bit words mixed from seed [N], position [N] and head."""
    low, high = seed & MASK32, (seed >> 32) & MASK32
    first = _mix(low ^ _mix(position & MASK32 ^ 0x243F6A88))
    second = _mix(high ^ first ^ (head * 0x9E3779B1 & MASK32))
    first = _mix(first ^ second ^ 0x85A308D3)
    return first << 32 | second


def gumbel(key: torch.Tensor, size: int) -> torch.Tensor:
    """Gumbel noise [N, size] fp32 for keys [N]; entry i depends on (key, i) alone."""
    ids = torch.arange(size, device=key.device)
    first, second = (key >> 32) & MASK32, key & MASK32
    bits = _mix(_mix(ids * 0x9E3779B1 & MASK32 ^ first[:, None]) ^ second[:, None])
    # 32 bits in (0, 1); small values keep their full resolution, and they are the ones that win.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash (xor-shift and multiply) on int64 tensors that hold 32-bit words."""
    x = (x ^ x >> 16) * 0x7FEB352D & MASK32
    x = (x ^ x >> 15) * 0x846CA68B & MASK32
    return x ^ x >> 16


# ------------------------------------------------------------------------------------------------- log probabilities


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For ids [N] under softmax(logits [N, V]): logprob [N] fp32, rank [N] int64 (1 = best), and each row's k best:
    top_ids [N, k] int64, top_logprobs [N, k] fp32, best first. k is cut to V.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, ids[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    top_logprobs, top_ids = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    return chosen[:, 0], rank, top_ids, top_logprobs


# ------------------------------------------------------------------------------------------------------ logits edits


def _on_device(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A host tensor where `like` is. What needs its size (unique, masks) was done on the host: nobody waits."""
    return values if like.is_cpu else values.pin_memory().to(like.device, non_blocking=True)


def apply_penalties(
    logits: torch.Tensor,
    context_ids: Sequence[Sequence[int]],
    output_ids: Sequence[Sequence[int]],
    presence: Sequence[float],
    frequency: Sequence[float],
    repetition: Sequence[float],
) -> None:
    """Lowers in place what was said before. logits [N, V] fp32; the rest has N entries, one per row.

    Repetition divides positive (multiplies negative) logits of ids in `context_ids` (prompt and output); then ids in
    `output_ids` lose frequency * count + presence. The caller has cut both lists to its window.
    """
    vocab = logits.shape[1]
    for row, (context, output) in enumerate(zip(context_ids, output_ids, strict=True)):
        if repetition[row] != 1.0 and len(context):
            ids = torch.tensor(context, dtype=torch.int64).unique()
            ids = _on_device(ids[(ids >= 0) & (ids < vocab)], logits)
            values = logits[row, ids]
            logits[row, ids] = torch.where(values > 0, values / repetition[row], values * repetition[row])
        if (presence[row] or frequency[row]) and len(output):
            ids, counts = torch.tensor(output, dtype=torch.int64).unique(return_counts=True)
            known = (ids >= 0) & (ids < vocab)
            ids, counts = _on_device(ids[known], logits), _on_device(counts[known], logits)
            logits[row, ids] -= frequency[row] * counts + presence[row]


def apply_bias(logits_row: torch.Tensor, ids: Sequence[int], values: Sequence[float]) -> None:
    """Adds values to logits_row [V] at ids (each named once), in place."""
    index = _on_device(torch.tensor(ids, dtype=torch.int64), logits_row)
    logits_row[index] += _on_device(torch.tensor(values, dtype=logits_row.dtype), logits_row)


def apply_allowed(logits_row: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Leaves only ids in the half-open ranges possible: everything else in logits_row [V] becomes -inf, in place."""
    last = 0
    vocab = logits_row.shape[0]
    for low, high in sorted(ranges):
        if low > last:
            logits_row[last : min(low, vocab)] = -torch.inf
        last = max(last, min(high, vocab))
    logits_row[last:] = -torch.inf


def apply_repetition(logits: torch.Tensor, context: torch.Tensor, repetition: torch.Tensor) -> None:
    """The repetition part of `apply_penalties` for many rows at once, in place and without a look from the host.

    logits [N, V] fp32; context [N, W] int64 ids (an id may stand there more than once); repetition [N, 1] fp32.
    """
    values = logits.gather(1, context)  # of an id that stands there twice both entries write the same
    logits.scatter_(1, context, torch.where(values > 0, values / repetition, values * repetition))


def apply_ranges(logits: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """`apply_allowed` for many rows at once: in row n of logits [N, V] only ids in low[n, r] <= id < high[n, r] (int64 [N, R],
    any r) stay possible."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for r in range(low.shape[1]):
        allowed |= (ids >= low[:, r, None]) & (ids < high[:, r, None])
    logits.masked_fill_(~allowed, -torch.inf)

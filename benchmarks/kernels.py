"""Each kernel's door beside what plain torch offers for the same job, on SmolLM2-135M's shapes, bf16, one table.

    python benchmarks/kernels.py [--json FILE] [--only DOOR,...] [--threads N]

Ours and torch's take turns; figures are medians in microseconds, the ratio is ours / torch's (lower is better). Numbers
of one door say little about a whole step: benchmarks/llm.py does that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from motet.kernels.activation import silu_mul
from motet.kernels.attention import PagedBatch, dense_attention, paged_attention
from motet.kernels.dispatch import backend
from motet.kernels.linear import from_tensor, linear, prepare, quantize_int4, quantize_int8
from motet.kernels.norm import rms_norm, rms_norm_residual
from motet.kernels.rotary import apply_rotary, rotate_reference
from motet.kernels.sampling import SamplingRows, sample

Work = Callable[[], object]
HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB, BLOCK = 9, 3, 64, 576, 1536, 49152, 16
BF16 = torch.bfloat16


def attention_case(num_seqs: int, rows_each: int, context: int) -> tuple[Work, Work]:
    """`num_seqs` sequences that end in `rows_each` new rows after `context` cached positions; torch gets K and V gathered."""
    total = context + rows_each
    per_seq = -(-total // BLOCK)
    kv = torch.randn(num_seqs * per_seq + 1, 2, KV_HEADS, BLOCK, DIM, dtype=BF16)
    q = torch.randn(num_seqs * rows_each, HEADS, DIM, dtype=BF16)
    table = torch.arange(1, num_seqs * per_seq + 1, dtype=torch.int32).view(num_seqs, per_seq)
    position = torch.arange(context, total).repeat(num_seqs)
    batch = PagedBatch(
        seq=torch.arange(num_seqs).repeat_interleave(rows_each), position=position, slots=(position,),
        num_visible=position + 1, block_tables=(table,), kv_lens=torch.full((num_seqs,), total),
        row_starts=torch.arange(num_seqs + 1) * rows_each, mark="decode" if rows_each == 1 else "mixed",
        max_kv_len=total, block_size=BLOCK, row_starts_list=tuple(range(0, (num_seqs + 1) * rows_each, rows_each)),
        kv_lens_list=(total,) * num_seqs,
    )  # fmt: skip
    whole = kv[table.long()].permute(2, 0, 3, 1, 4, 5).reshape(2, num_seqs, KV_HEADS, per_seq * BLOCK, DIM)
    keys, values = (part[:, :, :total].contiguous() for part in whole)
    queries = q.view(num_seqs, rows_each, HEADS, DIM).transpose(1, 2).contiguous()
    mask = torch.ones(rows_each, total, dtype=torch.bool).tril(context)

    def peer() -> object:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    return lambda: paged_attention(q, kv, batch, 0, scale=DIM**-0.5), peer


def dense_case(rows: int) -> tuple[Work, Work]:
    """One layer of Whisper tiny's encoder on `rows` frames; torch, too, gets views of the fused projection."""
    q, k, v = torch.randn(1, rows, 3, 6, DIM, dtype=BF16).unbind(2)
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    return (
        lambda: dense_attention(q, k, v, scale=DIM**-0.5),
        lambda: F.scaled_dot_product_attention(queries, keys, values),
    )


def linear_case(kind: str, rows: int, out: int = 2 * INNER, inputs: int = HIDDEN) -> tuple[Work, Work]:
    """A projection (the fused gate-up one unless sizes are given); torch multiplies bf16."""
    weight = torch.randn(out, inputs) * 0.02
    made = {"bf16": lambda: from_tensor(weight.to(BF16)), "int8": lambda: quantize_int8(weight)}
    prepared = prepare(made.get(kind, lambda: quantize_int4(weight))(), BF16)
    x, plain = torch.randn(rows, inputs, dtype=BF16), weight.to(BF16)
    return lambda: linear(x, prepared), lambda: F.linear(x, plain)


def sampling_case(temperature: float, rows: int) -> tuple[Work, Work]:
    """Sixteen rows of the whole vocabulary; torch: argmax, or softmax and multinomial."""
    logits = torch.randn(rows, VOCAB) * 4
    each = SamplingRows(
        temperature=torch.full((rows,), temperature), top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows), min_p=torch.zeros(rows), noise_seed=torch.arange(rows), any_random=temperature > 0,
        noise_position=torch.arange(rows), any_top_k=False, any_top_p=False, any_min_p=False,
    )  # fmt: skip
    if temperature == 0:
        return lambda: sample(logits, each), lambda: logits.argmax(-1)
    return lambda: sample(logits, each), lambda: torch.multinomial((logits / temperature).softmax(-1), 1)


def cases() -> dict[str, tuple[Work, Work]]:
    """Door and shape -> (ours, torch's)."""
    x, residual = torch.randn(16, HIDDEN, dtype=BF16), torch.zeros(16, HIDDEN)
    weight = torch.ones(HIDDEN, dtype=BF16)
    gate_up = torch.randn(16, 2 * INNER, dtype=BF16)
    q, k = torch.randn(16, HEADS, DIM, dtype=BF16), torch.randn(16, KV_HEADS, DIM, dtype=BF16)
    cos, sin = torch.randn(16, DIM // 2), torch.randn(16, DIM // 2)
    found = {
        "paged_attention decode 16 x 200": attention_case(16, 1, 200),
        "paged_attention decode 1 x 4096": attention_case(1, 1, 4096),
        "paged_attention prefill 512": attention_case(1, 512, 0),
        "dense_attention encoder 1500": dense_case(1500),
        "rms_norm 16": (lambda: rms_norm(x, weight, 1e-5), lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-5)),
        "rms_norm_residual 16": (
            lambda: rms_norm_residual(x, residual, weight, 1e-5),
            lambda: F.rms_norm((x + residual).to(BF16), (HIDDEN,), weight, 1e-5),
        ),
        "silu_mul 16": (
            lambda: silu_mul(gate_up),
            lambda: F.silu(gate_up[:, :INNER]) * gate_up[:, INNER:],
        ),
        "rotary 16": (
            lambda: apply_rotary(q, k, cos, sin),
            lambda: (rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)),
        ),
        "sample greedy 16": sampling_case(0.0, 16),
        "sample random 16": sampling_case(1.0, 16),
    }
    for kind in ("bf16", "int8", "int4"):
        for rows in (1, 16, 64, 1024):
            found[f"linear {kind} {rows}"] = linear_case(kind, rows)
    for out, inputs in ((3 * 384, 384), (384, 384), (1536, 384), (384, 1536)):  # Whisper tiny's encoder
        found[f"linear int8 1500 x {inputs} x {out}"] = linear_case("int8", 1500, out, inputs)
    found[f"linear int4 1 x {HIDDEN} x {VOCAB}"] = linear_case("int4", 1, VOCAB)  # the head
    return found


def microseconds(work: Work, *, seconds: float) -> float:
    """Time of one call, averaged over about `seconds`."""
    work()
    began = time.perf_counter()
    work()
    count = max(1, int(seconds / max(time.perf_counter() - began, 1e-7)))
    began = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - began) / count * 1e6


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="comma-separated beginnings of names")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.05, help="per figure; five figures make a median")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    wanted = tuple(filter(None, options.only.split(",")))
    rows = []
    print(f"kernels: {backend()}, {options.threads} threads, bf16; torch {torch.__version__}")
    print(f"{'door':34} {'ours us':>9} {'torch us':>9} {'ratio':>6}")
    for name, (ours, peer) in cases().items():
        if wanted and not name.startswith(wanted):
            continue
        pairs = [
            (microseconds(ours, seconds=options.seconds), microseconds(peer, seconds=options.seconds)) for _ in range(5)
        ]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append({"door": name, "ours_us": mine, "torch_us": theirs, "ratio": mine / theirs})
        print(f"{name:34} {mine:9.1f} {theirs:9.1f} {mine / theirs:6.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

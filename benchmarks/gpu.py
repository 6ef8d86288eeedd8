"""The GPU path in numbers: whole decode and prefill steps of Llama shapes with random weights, and single kernels.

    python benchmarks/gpu.py [--json FILE] [--only CLAIM,...] [--toy] [--minutes 8]

Needs torch, triton and numpy, nothing installed of ours: it imports motet.kernels and motet.models alone, through a link to
this checkout in a temporary folder. Runs with torch 2.11 and Python 3.12. On the machine that is lent (device.run; no
`carry`, nothing to install), from the repository's root:

    command:   python3 benchmarks/gpu.py --json $OUT/gpu.json 2>&1 | tee $OUT/gpu.log
    timeout_s: 600

`--toy` runs the same code at tiny sizes on whatever there is, a CPU too (through the CPU paths, or with TRITON_INTERPRET=1
through Triton's interpreter); its figures mean nothing.

First the machine's own limits are measured: memory bandwidth (the better of a copy and a sum over gigabytes) and the rate
of a bf16 matrix product of 8192 x 8192 x 8192, random numbers. All figures are medians. Rows are those of benchmarks/claims.py.

    claim                             ours / peer                                                           target
    decode_{8b,1b}_b{1,16,64,256}     tokens/s of a whole step, greedy sampling included, as a CUDA graph,  8b >= 0.85
                                      context 1024 / the same at the bandwidth bound: weights and K and V   1b >= 0.65
                                      read once at the measured bandwidth
    prefill_{8b,1b}                   TFLOP/s of 4 prompts of 2048 tokens / of the matrix product           >= 0.6
    attention_decode_b{1,64}          us of paged attention (context 8192, 2048) / of torch's SDPA over     <= 1.0
                                      K and V laid out in a row for it; the share of the bound is remarked
    attention_prefill                 us for one prompt of 4096 tokens / of SDPA, causal                    <= 1.1
    linear_int8_b1 linear_int4_b1     us for [4096, 14336] in INT8, INT4 (groups of 32) / of torch in bf16  <= 0.6, 0.4
    linear_int4_b16 linear_int4_b256  the same for 16 and 256 rows                                          <= 0.5, 1.3
    linear_fp8_b2048                  the same in FP8 (weights and activations) for 2048 rows               <= 0.65
    norm_residual silu_mul            us of the fused kernel for 64 rows / of torch's calls                 <= 0.7
    sample_b64                        us to sample 64 rows of 128,256 ids / of softmax and multinomial      <= 1.0
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _folder = tempfile.mkdtemp(prefix="motet-link-")
    os.symlink(Path(__file__).resolve().parent.parent, Path(_folder, "motet"))
    sys.path[0] = _folder  # instead of this script's folder, whose files have names that others look for

import torch
import torch.nn.functional as F

ON_GPU = torch.cuda.is_available()
if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
    os.environ.setdefault("MOTET_KERNELS", "triton")  # and no C++ is compiled for the CPU

from motet.kernels.activation import silu_mul  # noqa: E402
from motet.kernels.attention import PagedBatch, paged_attention  # noqa: E402
from motet.kernels.gpu.graph import GraphRecorder  # noqa: E402
from motet.kernels.linear import (  # noqa: E402
    LinearWeight,
    linear,
    linear_reference,
    prepare,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from motet.kernels.norm import rms_norm_residual  # noqa: E402
from motet.kernels.sampling import SamplingRows, sample  # noqa: E402
from motet.models.decoder import Decoder  # noqa: E402
from motet.models.decoder_config import DecoderConfig  # noqa: E402
from motet.models.parameters import Shapes, parameter_shapes  # noqa: E402
from motet.models.weight_reader import WeightReader  # noqa: E402

BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK = 16
TOY_WORDS = "TOY SIZES: the figures mean nothing"
Work = Callable[[], object]

LLAMA: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
}  # fmt: skip
TOY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; `toy` shrinks everything."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    prompts: tuple[int, int] = (4, 2048)  # how many, how long
    attention: tuple[tuple[int, int], ...] = ((1, 8192), (64, 2048))  # batch, context
    prefill: int = 4096
    heads: tuple[int, int, int] = (32, 8, 128)  # query heads, kv heads, head dim
    matrix: tuple[int, int] = (4096, 14336)  # out, in
    copies: int = 6  # of a matrix, used in turn: together they do not fit the L2 cache
    vocab: int = 128256
    hidden: int = 4096
    product: int = 8192
    buffer: int = 1 << 30  # numbers of 4 bytes
    repeats: int = 15
    rows_many: int = 2048
    rows_middle: int = 256


FULL = Sizes()
SMALL = Sizes(
    batches=(1, 3), context=20, prompts=(2, 24), attention=((1, 40), (3, 20)), prefill=32, heads=(4, 2, 16),
    matrix=(48, 64), copies=2, vocab=200, hidden=64, product=32, buffer=1 << 12, repeats=3, rows_many=20, rows_middle=17,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of this machine, measured."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What one claim came to."""

    ours: float
    peer: float
    peer_name: str
    unit: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    better: str
    target: float
    measure: Callable[[Sizes, Limits], Measure]


# ------------------------------------------------------------------------------------------------------------- timing


def seconds(work: Work, repeats: int, *, record: bool = True) -> float:
    """Median time of one call. On CUDA between events, as the replay of a graph unless told otherwise."""
    if not ON_GPU:
        work()
        return statistics.median(_wall(work) for _ in range(repeats))
    run: Work = GraphRecorder(DEVICE).record(work) if record else work
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)


def _wall(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_limits(sizes: Sizes) -> Limits:
    source = torch.rand(sizes.buffer, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), sizes.repeats)
    read = source.nbytes / seconds(lambda: source.sum(), sizes.repeats)
    n = sizes.product
    a, b = (torch.randn(n, n, device=DEVICE, dtype=BF16) for _ in range(2))
    return Limits(bytes_per_s=max(copied, read), flops_per_s=2 * n**3 / seconds(lambda: a @ b, sizes.repeats))


# -------------------------------------------------------------------------------------------------------- whole models


class DeviceSource:
    """Random weights made where they are used: 8 billion numbers from a CPU would take the time that the run has."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=BF16, device=DEVICE)
        return torch.randn(shape, dtype=BF16, device=DEVICE) * shape[1] ** -0.5

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> torch.Tensor:
        return self.get(name).narrow(dim, lo, hi - lo)


_models: dict[str, Decoder] = {}


def model_of(name: str, sizes: Sizes) -> Decoder:
    """The model, made at its first use; only one is kept."""
    if name not in _models:
        _models.clear()
        if ON_GPU:
            torch.cuda.empty_cache()
        shape = LLAMA[name] if sizes is FULL else TOY
        config = DecoderConfig.from_dict(
            {**shape, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192}
        )
        shapes = parameter_shapes(config)
        model = Decoder(config, dtype=BF16, device=DEVICE)
        model.load(WeightReader(DeviceSource(shapes), shapes, dtype=BF16, device=DEVICE))
        _models[name] = model
    return _models[name]


def read_bytes(model: Decoder) -> int:
    """Bytes of weights that a step reads: all but an embedding that is no head too."""
    config = model.config
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * 2
    return model.weight_bytes - table


def make_batch(num_seqs: int, rows_each: int, total: int) -> PagedBatch:
    """`num_seqs` sequences of `total` tokens, of which the last `rows_each` are this step's; pages in mixed order."""
    per_seq = -(-total // BLOCK)
    order = torch.randperm(num_seqs * per_seq, device=DEVICE).to(torch.int32) + 1
    table = order.view(num_seqs, per_seq)
    position = torch.arange(total - rows_each, total, device=DEVICE).repeat(num_seqs)
    seq = torch.arange(num_seqs, device=DEVICE).repeat_interleave(rows_each)
    slots = table[seq, position // BLOCK].long() * BLOCK + position % BLOCK
    # Recorded decode steps hold no ints that would change from step to step; see engine/graphs.py.
    starts = () if rows_each == 1 else tuple(range(0, num_seqs * rows_each + 1, rows_each))
    return PagedBatch(
        seq=seq, position=position, slots=(slots,), num_visible=position + 1, block_tables=(table,),
        kv_lens=torch.full((num_seqs,), total, device=DEVICE),
        row_starts=torch.arange(num_seqs + 1, device=DEVICE) * rows_each,
        mark="decode" if rows_each == 1 else "prefill" if num_seqs == 1 else "mixed", max_kv_len=total, block_size=BLOCK,
        row_starts_list=starts, kv_lens_list=(total,) * num_seqs if starts else (),
    )  # fmt: skip


def make_cache(num_seqs: int, total: int, kv_heads: int, dim: int) -> torch.Tensor:
    blocks = num_seqs * -(-total // BLOCK) + 1
    return torch.empty(blocks, 2, kv_heads, BLOCK, dim, dtype=BF16, device=DEVICE).normal_()


def greedy(num_rows: int, temperature: float = 0.0) -> SamplingRows:
    rows = torch.arange(num_rows, device=DEVICE)
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature, device=DEVICE), top_k=torch.zeros_like(rows),
        top_p=torch.ones(num_rows, device=DEVICE), min_p=torch.zeros(num_rows, device=DEVICE), noise_seed=rows,
        noise_position=rows, any_random=temperature > 0, any_top_k=False, any_top_p=False, any_min_p=False,
    )  # fmt: skip


def decode(name: str, batch_index: int) -> Callable[[Sizes, Limits], Measure]:
    def measure(sizes: Sizes, limits: Limits) -> Measure:
        num_seqs = sizes.batches[min(batch_index, len(sizes.batches) - 1)]
        model = model_of(name, sizes)
        spec = model.kv_specs()[0]
        kvs = [make_cache(num_seqs, sizes.context, spec.num_kv_heads, spec.head_dim) for _ in model.blocks]
        batch, groups = make_batch(num_seqs, 1, sizes.context), [0] * len(kvs)
        ids, rows = torch.randint(0, model.vocab_size, (num_seqs,), device=DEVICE), greedy(num_seqs)

        def step() -> torch.Tensor:
            return sample(model.logits(model.forward(model.embed(ids), batch, kvs, groups)), rows)

        took = seconds(step, sizes.repeats)
        kv_bytes = num_seqs * sizes.context * len(kvs) * 2 * spec.num_kv_heads * spec.head_dim * 2
        bound = (read_bytes(model) + kv_bytes) / limits.bytes_per_s
        return Measure(
            ours=num_seqs / took, peer=num_seqs / bound, peer_name="bandwidth bound", unit="tok/s",
            why=f"{num_seqs} sequences, context {sizes.context}: {took * 1e3:.3f} ms a step, bound {bound * 1e3:.3f} ms",
        )  # fmt: skip

    return measure


def prefill(name: str) -> Callable[[Sizes, Limits], Measure]:
    def measure(sizes: Sizes, limits: Limits) -> Measure:
        num_seqs, length = sizes.prompts
        model = model_of(name, sizes)
        spec, config = model.kv_specs()[0], model.config
        kvs = [make_cache(num_seqs, length, spec.num_kv_heads, spec.head_dim) for _ in model.blocks]
        batch, groups = make_batch(num_seqs, length, length), [0] * len(kvs)
        ids = torch.randint(0, model.vocab_size, (num_seqs * length,), device=DEVICE)
        last = torch.arange(1, num_seqs + 1, device=DEVICE) * length - 1

        def step() -> torch.Tensor:
            return model.logits(model.forward(model.embed(ids), batch, kvs, groups)[last])

        took = seconds(step, max(5, sizes.repeats // 3) if ON_GPU else sizes.repeats, record=False)
        head = config.vocab_size * config.hidden_size
        matrices = read_bytes(model) // 2 - head  # numbers, norms among them: 0.01 percent
        flops = 2 * matrices * num_seqs * length + 2 * head * num_seqs
        flops += 2 * 2 * config.num_heads * config.head_dim * len(kvs) * num_seqs * length * (length + 1) // 2
        return Measure(
            ours=flops / took / 1e12, peer=limits.flops_per_s / 1e12, peer_name="torch bf16 matrix product",
            unit="TFLOP/s", why=f"{num_seqs} prompts of {length} tokens in {took * 1e3:.1f} ms, not recorded as a graph",
        )  # fmt: skip

    return measure


# ------------------------------------------------------------------------------------------------------ single kernels


def compare(
    ours: Sequence[Work],
    peer: Sequence[Work],
    sizes: Sizes,
    peer_name: str,
    *,
    error: float,
    most: float,
    why: str = "",
) -> Measure:
    """Ours beside the peer's; several works are the same one on other tensors, done in turn. `error` above `most`: refused."""
    if not error <= most:
        raise AssertionError(f"wrong result: relative error {error:.2g}, at most {most:.2g} expected")

    def all_of(works: Sequence[Work]) -> float:
        def run() -> None:
            for work in works:
                work()

        return seconds(run, sizes.repeats) / len(works)

    first, second = all_of(ours), all_of(peer)
    return Measure(
        ours=first * 1e6, peer=second * 1e6, peer_name=peer_name, unit="us", why=f"{why}relative error {error:.1e}"
    )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def attention_decode(index: int) -> Callable[[Sizes, Limits], Measure]:
    def measure(sizes: Sizes, limits: Limits) -> Measure:
        num_seqs, context = sizes.attention[index]
        return _attention(num_seqs, 1, context, sizes, limits)

    return measure


def attention_prefill(sizes: Sizes, limits: Limits) -> Measure:
    return _attention(1, sizes.prefill, sizes.prefill, sizes, limits)


def _attention(num_seqs: int, rows_each: int, total: int, sizes: Sizes, limits: Limits) -> Measure:
    heads, kv_heads, dim = sizes.heads
    batch = make_batch(num_seqs, rows_each, total)
    kv = make_cache(num_seqs, total, kv_heads, dim)
    q = torch.randn(num_seqs * rows_each, heads, dim, dtype=BF16, device=DEVICE)
    pages = kv[batch.block_tables[0].long()].permute(2, 0, 3, 1, 4, 5).reshape(2, num_seqs, kv_heads, -1, dim)
    keys, values = (part[:, :, :total].contiguous() for part in pages)
    queries = q.view(num_seqs, rows_each, heads, dim).transpose(1, 2).contiguous()
    causal = rows_each > 1

    def ours() -> torch.Tensor:
        return paged_attention(q, kv, batch, 0, scale=dim**-0.5)

    def peer() -> torch.Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)

    expected = F.scaled_dot_product_attention(
        queries[:1].float(), keys[:1].float(), values[:1].float(), is_causal=causal, enable_gqa=True
    )
    got = ours()[:rows_each].transpose(0, 1)[None]
    bytes_read = num_seqs * total * 2 * kv_heads * dim * 2
    measured = compare(
        [ours], [peer], sizes, "torch SDPA, K and V in a row", error=relative_error(got, expected), most=0.01
    )
    bound = bytes_read / limits.bytes_per_s * 1e6
    if causal:
        bound = 2 * 2 * heads * dim * total * (total + 1) // 2 / limits.flops_per_s * 1e6
    share = f"{bound / measured.ours:.2f} of the {'matrix' if causal else 'bandwidth'} bound, SDPA {bound / measured.peer:.2f}; "
    return Measure(**{**measured.__dict__, "why": share + measured.why})


def quantized(kind: str, num_rows: Callable[[Sizes], int]) -> Callable[[Sizes, Limits], Measure]:
    makers = {"int8": quantize_int8, "int4": quantize_int4, "fp8": quantize_fp8}

    def measure(sizes: Sizes, limits: Limits) -> Measure:
        out, width = sizes.matrix
        x = torch.randn(num_rows(sizes), width, dtype=BF16, device=DEVICE)
        plain = [torch.randn(out, width, dtype=BF16, device=DEVICE) * width**-0.5 for _ in range(sizes.copies)]
        stored = [makers[kind](weight) for weight in plain]
        ready = [prepare(weight, BF16, DEVICE) for weight in stored]
        error = relative_error(linear(x, ready[0]), linear_reference(x, stored[0]))
        bound = (ready[0].num_bytes + x.nbytes + 2 * x.shape[0] * out) / limits.bytes_per_s * 1e6

        def multiply(weight: LinearWeight) -> Work:
            return lambda: linear(x, weight)

        def peer(weight: torch.Tensor) -> Work:
            return lambda: F.linear(x, weight)

        measured = compare(
            [multiply(weight) for weight in ready], [peer(weight) for weight in plain], sizes, "torch bf16",
            error=error, most=0.05 if kind == "fp8" else 0.02, why=f"layout {ready[0].layout}, ",
        )  # fmt: skip
        share = f"{bound / measured.ours:.2f} of the bandwidth bound; "
        return Measure(**{**measured.__dict__, "why": share + measured.why})

    return measure


def norm_residual(sizes: Sizes, limits: Limits) -> Measure:
    x = torch.randn(64, sizes.hidden, dtype=BF16, device=DEVICE)
    residual, weight = torch.randn(64, sizes.hidden, device=DEVICE), torch.rand(sizes.hidden, device=DEVICE, dtype=BF16)

    def peer() -> torch.Tensor:
        total = x + residual
        return F.rms_norm(total.to(BF16), (sizes.hidden,), weight, 1e-5)

    expected = F.rms_norm(x.double() + residual.double(), (sizes.hidden,), weight.double(), 1e-5)
    error = relative_error(rms_norm_residual(x, residual.clone(), weight, 1e-5)[0], expected)
    return compare(
        [lambda: rms_norm_residual(x, residual, weight, 1e-5)],
        [peer],
        sizes,
        "torch add and rms_norm",
        error=error,
        most=0.01,
    )


def silu(sizes: Sizes, limits: Limits) -> Measure:
    gate_up = torch.randn(64, 2 * sizes.hidden, dtype=BF16, device=DEVICE)
    gate, up = gate_up.chunk(2, dim=-1)
    error = relative_error(silu_mul(gate_up), F.silu(gate.double()) * up.double())
    return compare(
        [lambda: silu_mul(gate_up)],
        [lambda: F.silu(gate) * up],
        sizes,
        "torch silu and product",
        error=error,
        most=0.01,
    )


def sampling(sizes: Sizes, limits: Limits) -> Measure:
    logits = torch.randn(64, sizes.vocab, device=DEVICE) * 4
    rows = greedy(64, temperature=1.0)
    # Greedy rows must be the maxima; random ones have a law, which tests/kernels/test_sampling.py holds.
    wrong = float((sample(logits, greedy(64)) != logits.argmax(-1)).float().mean())
    return compare(
        [lambda: sample(logits, rows)], [lambda: torch.multinomial(logits.softmax(-1), 1)], sizes,
        "torch softmax and multinomial", error=wrong, most=0.0,
    )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    *(
        claim
        for name, target in (("8b", 0.85), ("1b", 0.65))
        for claim in (
            *(
                Claim(id=f"decode_{name}_b{size}", better="higher", target=target, measure=decode(name, index))
                for index, size in enumerate(FULL.batches)
            ),
            Claim(id=f"prefill_{name}", better="higher", target=0.6, measure=prefill(name)),
        )
    ),
    *(
        Claim(id=f"attention_decode_b{size}", better="lower", target=1.0, measure=attention_decode(index))
        for index, (size, _) in enumerate(FULL.attention)
    ),
    Claim(id="attention_prefill", better="lower", target=1.1, measure=attention_prefill),
    Claim(id="linear_int8_b1", better="lower", target=0.6, measure=quantized("int8", lambda sizes: 1)),
    Claim(id="linear_int4_b1", better="lower", target=0.4, measure=quantized("int4", lambda sizes: 1)),
    Claim(id="linear_int4_b16", better="lower", target=0.5, measure=quantized("int4", lambda sizes: 16)),
    Claim(
        id="linear_int4_b256", better="lower", target=1.3, measure=quantized("int4", lambda sizes: sizes.rows_middle)
    ),
    Claim(id="linear_fp8_b2048", better="lower", target=0.65, measure=quantized("fp8", lambda sizes: sizes.rows_many)),
    Claim(id="norm_residual", better="lower", target=0.7, measure=norm_residual),
    Claim(id="silu_mul", better="lower", target=0.7, measure=silu),
    Claim(id="sample_b64", better="lower", target=1.0, measure=sampling),
)


# -------------------------------------------------------------------------------------------------------------- output


def machine() -> str:
    if not ON_GPU:
        return f"{platform.processor() or platform.machine()}, no GPU, torch {torch.__version__}"
    found = torch.cuda.get_device_properties(0)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, Python {platform.python_version()}"


def row_of(claim: Claim, sizes: Sizes, limits: Limits) -> dict[str, Any]:
    """The claim measured, in the keys of benchmarks/claims.py. What goes wrong is a row too."""
    row: dict[str, Any] = {
        "claim": claim.id, "ours": None, "peer": None, "peer_name": None, "ratio": None, "better": claim.better,
        "target": claim.target, "holds": False, "unit": "", "runs": 0, "machine": machine(), "why": "",
    }  # fmt: skip
    try:
        found = claim.measure(sizes, limits)
    except Exception as error:  # the other claims have their turn all the same
        where = traceback.extract_tb(error.__traceback__)[-1]
        return row | {"why": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:400]}
    ratio = found.ours / found.peer
    holds = sizes is FULL and (ratio >= claim.target if claim.better == "higher" else ratio <= claim.target)
    return row | {
        "ours": found.ours, "peer": found.peer, "peer_name": found.peer_name, "ratio": ratio, "holds": holds,
        "unit": found.unit, "runs": sizes.repeats, "why": found.why if sizes is FULL else f"{TOY_WORDS}; {found.why}",
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [("claim", "ours", "peer", "unit", "ratio", "target", "holds", "peer and remark")]
    for row in rows:
        sign = ">=" if row["better"] == "higher" else "<="
        numbers = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("ours", "peer", "ratio")]
        remark = "; ".join(part for part in (row["peer_name"], row["why"]) if part)
        cells.append(
            (row["claim"], numbers[0], numbers[1], row["unit"], numbers[2], f"{sign} {row['target']:g}",
             "yes" if row["holds"] else "NO", remark)
        )  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(7)] + [0]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


@torch.inference_mode()
def main(
    arguments: list[str] | None = None, *, claims: Sequence[Claim] | None = None, description: str | None = __doc__
) -> int:
    """The command line; `claims` None: those of this file."""
    claims = CLAIMS if claims is None else claims
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--only", default="", metavar="CLAIM,...", help="ids, or their beginnings")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on a CPU too; the figures mean nothing")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="claims whose turn has not come by then are left out"
    )
    options = parser.parse_args(arguments)
    if not (ON_GPU or options.toy):
        parser.error("no CUDA device here; --toy runs anywhere")
    wanted = tuple(part.strip() for part in options.only.split(",") if part.strip())
    chosen = [claim for claim in claims if not wanted or claim.id.startswith(wanted)]
    if not chosen:
        parser.error(f"--only: no such claim; known: {', '.join(claim.id for claim in claims)}")
    began, sizes = time.monotonic(), SMALL if options.toy else FULL
    torch.manual_seed(0)
    limits = measure_limits(sizes)
    rows = []
    for claim in chosen:
        if time.monotonic() - began > options.minutes * 60:
            row = row_of(Claim(**{**claim.__dict__, "measure": _late}), sizes, limits)
        else:
            row = row_of(claim, sizes, limits)
        rows.append(row)
        print(f"{time.monotonic() - began:6.1f} s  {row['claim']}: {row['ratio']}  {row['why']}", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
        if options.json:  # after every claim: a run that is cut short leaves what it has
            part = options.json.with_name(f".{options.json.name}.{os.getpid()}")
            part.write_text(json.dumps(rows, indent=1) + "\n")
            part.replace(options.json)
    print(table(rows))
    print(
        f"{machine()}; measured here: {limits.bytes_per_s / 1e12:.3f} TB/s, {limits.flops_per_s / 1e12:.1f} TFLOP/s bf16"
        + (f"; {TOY_WORDS}" if options.toy else "")
    )
    return 0


def _late(sizes: Sizes, limits: Limits) -> Measure:
    raise TimeoutError("its turn did not come in time")


if __name__ == "__main__":
    sys.exit(main())

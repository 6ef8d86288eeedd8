"""Measure what our kernels cost in quality: perplexity of each quantized format as we serve it, over the same weights in fp32.

    python benchmarks/quality.py [--json FILE] [--only CLAIM,...] [--dtype bfloat16|float32|auto] [--threads N]

    ppl_q4_1  ppl_q4_0  ppl_q8_0   GGUF files; the packaged one, and two that llama.cpp's own quantizer makes of it
    ppl_int8  ppl_int4             our own quantization at load of a bf16 checkpoint of the same model

The other side of each ratio is `transformers` in fp32 on exactly the quantized values, dequantized: a ratio of 1 says that
nothing is lost between a weight's stored value and the answer. (How much a format itself loses is another question; for int8
and int4 the remark tells it.)

The text is English: the first tokens of our LICENSE, then CPython's own documentation topics (`pydoc_data.topics`), cut
into windows of 1,024 tokens. Every format is measured on the three paths that a request's tokens take, since each has kernels
of its own: a prompt in steps of 512 rows, one row a step for eight sequences together, and one row a step for one sequence
alone. The table shows the path with the worst ratio. Everything runs through the engine's own runner.

Exit status 0 when it ran, 1 when we ourselves could not be measured.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from motet.benchmarks import claims
from motet.benchmarks.claims import Claim, Row
from motet.benchmarks.llm import MODEL, TEXT, built_kernels
from motet.benchmarks.llm_claims import peers
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.peer_worker import PEERS, PeerError
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError
from motet.engine.load import load_runner
from motet.engine.model_runner import ModelRunner
from motet.engine.types import NewSequence, SamplingParams, SequenceStep, StepPlan
from motet.kernels.linear import dequantize, quantize_int4, quantize_int8
from motet.models.registry import resolve
from motet.models.tokenizer import load_tokenizer
from motet.models.weight_reader import INT4_GROUP

TARGET = 1.005
FORMATS = ("q4_1", "q4_0", "q8_0", "int8", "int4")
CLAIMS = {f"ppl_{name}": Claim(id=f"ppl_{name}", better="lower", target=TARGET, unit="perplexity") for name in FORMATS}
Windows = list[list[int]]
# Log probabilities of windows' tokens: one list a window, one entry a token from the second on.
Scores = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much text. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    windows: int = 8
    window: int = 1024
    licence: int = 2048  # tokens of the licence; the documentation follows
    chunk: int = 512  # rows of a prompt's step


REHEARSAL = Sizes(windows=2, window=48, licence=48, chunk=16)


def main(argv: Sequence[str] | None = None) -> int:
    parser = claims.make_parser(__doc__, list(CLAIMS.values()), ())
    parser.add_argument("--model", default=MODEL, help="a GGUF in Q4_1 that Motet can name (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="bfloat16",
                        help="of our activations and cache (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does it run? The figures mean nothing")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if not options.rehearse:
        say(built_kernels())
    sizes = REHEARSAL if options.rehearse else Sizes()
    packaged = resolve(options.model).path
    tokens = read_text(packaged, sizes)
    rows = []
    for name in options.only:
        claim = CLAIMS[name]
        try:
            rows.append(measure(claim, name.removeprefix("ppl_"), packaged, tokens, sizes, options))
        except PeerError as error:
            rows.append(claims.failed(claim, str(error)))
        except (MotetError, OSError) as error:
            rows.append(claims.failed(claim, f"{claims.OURS_FAILED}{error}"))
        say(f"  {claims.table(rows[-1:]).splitlines()[2]}")
        gc.collect()
    return claims.report(rows, rehearsed=options.rehearse, json_file=options.json)


def read_text(model: Path, sizes: Sizes) -> Windows:
    """Windows of English text: the licence's first tokens, then CPython's documentation, topics in alphabetical order."""
    tokenizer = load_tokenizer(model)
    needed = sizes.windows * sizes.window
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[: sizes.licence]
    for name in sorted(topics):
        if len(ids) >= needed:
            break
        ids += tokenizer.encode(topics[name], add_special_tokens=False)
    if len(ids) < needed:
        raise SystemExit(f"only {len(ids)} of {needed} tokens of text are here")
    return [ids[start : start + sizes.window] for start in range(0, needed, sizes.window)]


def measure(
    claim: Claim, kind: str, packaged: Path, windows: Windows, sizes: Sizes, options: argparse.Namespace
) -> Row:
    """The row of one format. Raises PeerError when its file cannot be made, MotetError when we cannot run it."""
    say(f"{kind}: the reference, transformers in fp32")
    path, network, remark = prepare(kind, packaged, windows)
    expected = reference_scores(network, windows)
    del network
    gc.collect()
    say(f"{kind}: ours")
    config = EngineConfig(
        dtype=options.dtype,
        device="cpu",
        quantize=kind if kind in ("int8", "int4") else "",  # type: ignore[arg-type]
        num_blocks=len(windows) * -(-sizes.window // EngineConfig.block_size) + 1,
        max_num_seqs=len(windows),
    )
    loaded = load_runner(str(path), config)
    ratios: dict[str, tuple[float, float, float]] = {}
    for name, scores in our_scores(loaded.runner, windows, len(loaded.groups), sizes).items():
        ours, reference = perplexity(scores), perplexity(expected)
        ratios[name] = (ours / reference, ours, reference)
        say(f"  {name}: {ours:.4f} beside {reference:.4f}, ratio {ours / reference:.5f}")
    worst = max(ratios, key=lambda name: ratios[name][0])
    sha = hashlib.sha256(repr(windows).encode()).hexdigest()[:12]
    return claims.measured(
        claim, ratios[worst][1], ratios[worst][2], peer_name="transformers fp32 on the dequantized weights",
        ours_name=f"{path.name}, {loaded.resolved.dtype}, weights {loaded.resolved.weights}", runs=1,
        why=f"{sum(map(len, windows))} tokens (ids sha256 {sha}), windows of {sizes.window}; worst path: {worst}; "
        + ", ".join(f"{name} {ratio:.5f}" for name, (ratio, _, _) in ratios.items())
        + remark,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the reference


def prepare(kind: str, packaged: Path, windows: Windows) -> tuple[Path, Any, str]:
    """What we are to serve, the reference network on the same values, and a remark on what the format itself loses."""
    if kind in ("int8", "int4"):
        path = packaged
        if path.suffix == ".gguf":
            path = peers.made_by([sys.executable, PEERS / "export_hf.py", "--gguf", packaged], what="a bf16 checkpoint")
        network = from_checkpoint(path)
        plain = perplexity(reference_scores(network, windows))
        requantize(network, kind)
        return path, network, f"; before quantization, in fp32: {plain:.4f}"
    path = packaged if kind == "q4_1" else peers.requantized(packaged, kind)
    return path, from_gguf(path), ""


def from_checkpoint(folder: Path) -> Any:
    """A transformers model in fp32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def from_gguf(path: Path) -> Any:
    """A transformers model in fp32 with a GGUF's values, dequantized by the `gguf` package."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=network, torch_dtype=torch.float32
    )["tensors"]  # fmt: skip
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    if unexpected or not set(missing) <= {"lm_head.weight"}:
        raise OSError(f"{path.name}: missing {missing}, unexpected {unexpected}")
    network.tie_weights()
    return network.eval()


@torch.inference_mode()
def requantize(network: Any, kind: str) -> None:
    """Replace every matrix that we quantize at load by its quantized values, in place; tied embeddings with their head."""
    for name, module in network.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        eight = kind == "int8" or name == "lm_head" or module.in_features % INT4_GROUP
        made = quantize_int8(module.weight) if eight else quantize_int4(module.weight, INT4_GROUP)
        module.weight.copy_(dequantize(made, torch.float32))


@torch.inference_mode()
def reference_scores(network: Any, windows: Windows) -> Scores:
    """Log probabilities that the network gives each window's tokens."""
    scores = []
    for window in windows:
        ids = torch.tensor(window)
        logprobs = network(ids[None]).logits[0, :-1].float().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[1:, None])[:, 0].tolist())
    return scores


# --------------------------------------------------------------------------------------------------------------- ours


def our_scores(runner: ModelRunner, windows: Windows, num_groups: int, sizes: Sizes) -> dict[str, Scores]:
    """The same through our runner, on each path."""
    num_rows = len(windows)
    return {
        f"prompt, {sizes.chunk} rows": [
            score for window in windows for score in teacher_forced(runner, [window], num_groups, rows_each=sizes.chunk)
        ],
        f"{num_rows} sequences, {num_rows} rows": teacher_forced(runner, windows, num_groups, rows_each=1),
        "1 sequence, 1 row": [
            score for window in windows for score in teacher_forced(runner, [window], num_groups, rows_each=1)
        ],
    }


def teacher_forced(runner: ModelRunner, windows: Windows, num_groups: int, *, rows_each: int) -> Scores:
    """Log probabilities of the windows' tokens, all windows (of one length) together, `rows_each` of each a step."""
    length = len(windows[0])
    per = -(-length // runner.block_size)
    new = [
        NewSequence(
            slot=slot,
            token_ids=window,
            num_prompt=length,
            block_ids=[list(range(1 + slot * per, 1 + (slot + 1) * per))] * num_groups,
            params=SamplingParams(prompt_logprobs=0),
            seed=0,
        )
        for slot, window in enumerate(windows)
    ]
    scores: Scores = [[] for _ in windows]
    for start in range(0, length, rows_each):
        count = min(rows_each, length - start)
        steps = [SequenceStep(slot=slot, start=start, num_tokens=count, sample=False) for slot in range(len(windows))]
        done = runner.run(StepPlan(step=start, new=new if start == 0 else [], steps=steps))
        for result in done.results:
            scores[result.slot].extend(entry.logprob for entry in result.prompt_logprobs or ())
    runner.run(StepPlan(step=length, release=list(range(len(windows)))))
    assert all(len(score) == length - 1 for score in scores)
    return scores


def perplexity(scores: Scores) -> float:
    """exp of the mean negative log probability over all tokens of all windows."""
    flat = [value for score in scores for value in score]
    return math.exp(-sum(flat) / len(flat))


if __name__ == "__main__":
    sys.exit(main())

"""Measure vLLM on CPUs: a worker that loads a model once and then obeys JSON commands on stdin, one a line.

Run it with the python of the `vllm` peer environment (see build.sh; export_hf.py makes the model directory):

    python run_vllm.py --model-dir DIR [--streams 16] [--threads 2] [--context 1152] [--dtype bfloat16]

It speaks the protocol of run_llamacpp.py: a line `{"ready": true, ...}` after loading and a warm-up, then one
answer, `{"seconds": s, "tokens": n}`, for each command `streams`, `generate`, `prefill` or `quit`. vLLM's offline
interface tells nothing of when the first token came, so for that ask for `prefill`.

Sampling is greedy, the end of text is ignored, prefix caching is off, no text is made of the tokens. The model is
compiled (vLLM's own default on CPUs) unless `--eager` is given. A start takes one to two minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def environment(threads: int, cache_gib: int) -> None:
    """Set what vLLM reads from the environment; must come before it is imported."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if len(cores) < threads:
        raise SystemExit(f"{threads} threads asked for, {len(cores)} cores allowed")


def run(llm: Any, prompts: list[list[int]], max_tokens: int, ids: bool) -> dict[str, Any]:
    """Continue all prompts together by `max_tokens` greedy tokens and report the time."""
    from vllm import SamplingParams

    if not prompts or max_tokens < 1:
        raise ValueError("at least one prompt, at least one token")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    new = [list(output.outputs[0].token_ids) for output in outputs]
    answer: dict[str, Any] = {"seconds": seconds, "tokens": sum(map(len, new))}
    if ids:
        answer["ids"] = new
    return answer


def obey(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command."""
    ids = bool(command.get("ids"))
    match command.get("cmd"):
        case "streams":
            return run(llm, command["prompts"], int(command["max_tokens"]), ids)
        case "generate":
            return run(llm, [command["prompt"]], int(command["max_tokens"]), ids)
        case "prefill":
            return run(llm, [command["prompt"]], 1, ids)
        case other:
            raise ValueError(f"no such command: {other}")


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True, help="a Hugging Face directory")
    parser.add_argument("--streams", type=int, default=16, help="most prompts at the same time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=1152, help="most tokens of a sequence, with the new ones")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-gib", type=int, default=1, help="room for keys and values")
    parser.add_argument("--eager", action="store_true", help="do not compile: starts faster, runs slower")
    args = parser.parse_args()

    # vLLM and its engine process log to stdout: keep it for ourselves and point file descriptor 1 at stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    environment(args.threads, args.cache_gib)
    began = time.perf_counter()
    import torch
    from vllm import LLM

    torch.set_num_threads(1)  # this process only hands out work; the engine's own threads are bound above
    llm = LLM(
        model=str(Path(args.model_dir).expanduser().resolve()),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=args.context,
        max_num_seqs=args.streams,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        disable_log_stats=True,
        seed=0,
    )
    warm = [[(7 * i + j) % 1000 + 100 for j in range(64)] for i in range(args.streams)]
    run(llm, warm, 8, False)
    run(llm, warm[:1], 8, False)
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    say(
        {
            "ready": True,
            "name": "vllm",
            "version": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "dtype": args.dtype,
            "threads": args.threads,
            "load_seconds": time.perf_counter() - began,
            "tcmalloc": "tcmalloc" in os.environ.get("LD_PRELOAD", ""),
        }
    )
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            command = json.loads(line)
            if command.get("cmd") == "quit":
                break
            say(obey(llm, command))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            say({"error": f"{type(error).__name__}: {error}"})
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

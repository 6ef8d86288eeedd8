"""Measure OpenVINO GenAI: a worker that loads a GGUF once and then obeys JSON commands on stdin, one a line.

Run it with the python of the `openvino-genai` peer environment (see build.sh):

    python run_openvino.py --gguf model.gguf --hint f32|bf16 [--streams 16] [--threads 2] [--context 1152]

It speaks the protocol of run_llamacpp.py: a line `{"ready": true, ...}` after loading and a warm-up, then one
answer, `{"seconds": s, "tokens": n}`, for each command `streams`, `generate`, `prefill` or `quit`.

Its continuous-batching pipeline runs (the one that its server uses), on token ids. Sampling is greedy, the end of text
is ignored, prefix caching is off. `--hint` is the precision it computes in: f32 decodes faster on some processors, bf16
prefills faster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Engine:
    """A pipeline with room for a number of sequences."""

    def __init__(self, gguf: str, hint: str, streams: int, threads: int, cache_gib: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = streams
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", properties)

    def run(self, prompts: list[list[int]], max_tokens: int, ids: bool) -> dict[str, Any]:
        """Continue all prompts together by `max_tokens` greedy tokens and report the time."""
        if not prompts or max_tokens < 1:
            raise ValueError("at least one prompt, at least one token")
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        began = time.perf_counter()
        results = self._pipeline.generate(tensors, [config] * len(prompts))
        seconds = time.perf_counter() - began
        new = [list(result.m_generation_ids[0]) for result in results]
        answer: dict[str, Any] = {"seconds": seconds, "tokens": sum(map(len, new))}
        if ids:
            answer["ids"] = new
        return answer


def obey(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command."""
    ids = bool(command.get("ids"))
    match command.get("cmd"):
        case "streams":
            return engine.run(command["prompts"], int(command["max_tokens"]), ids)
        case "generate":
            return engine.run([command["prompt"]], int(command["max_tokens"]), ids)
        case "prefill":
            return engine.run([command["prompt"]], 1, ids)
        case other:
            raise ValueError(f"no such command: {other}")


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, help="the model")
    parser.add_argument("--hint", choices=("f32", "bf16"), required=True, help="the precision it computes in")
    parser.add_argument("--streams", type=int, default=16, help="most prompts at the same time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=1152, help="not used: the cache is shared")
    parser.add_argument("--cache-gib", type=int, default=1, help="room for keys and values")
    args = parser.parse_args()

    # Keep stdout for the answers; whatever the libraries print goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    began = time.perf_counter()
    engine = Engine(args.gguf, args.hint, args.streams, args.threads, args.cache_gib)
    warm = [[(7 * i + j) % 1000 + 100 for j in range(64)] for i in range(args.streams)]
    engine.run(warm, 8, False)
    engine.run(warm[:1], 8, False)
    say(
        {
            "ready": True,
            "name": "openvino-genai",
            "version": importlib.metadata.version("openvino-genai"),
            "dtype": f"{os.path.basename(args.gguf)}, hint {args.hint}",
            "threads": args.threads,
            "load_seconds": time.perf_counter() - began,
        }
    )
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            command = json.loads(line)
            if command.get("cmd") == "quit":
                break
            say(obey(engine, command))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            say({"error": f"{type(error).__name__}: {error}"})
    out.flush()
    os._exit(0)  # its threads may not end by themselves


if __name__ == "__main__":
    main()

"""Measure llama.cpp: a worker that loads a GGUF once and then obeys JSON commands on stdin, one a line.

Run it with the python of the `llamacpp` peer environment (see build.sh):

    python run_llamacpp.py --gguf model.gguf [--streams 16] [--threads 2] [--context 1152]

After loading and a warm-up it prints one line, `{"ready": true, "name": ..., "version": ..., "dtype": ..., ...}`.
Then it takes the commands

    {"cmd": "streams", "prompts": [[ids], ...], "max_tokens": 128}   all prompts at the same time
    {"cmd": "generate", "prompt": [ids], "max_tokens": 128}          one prompt alone
    {"cmd": "prefill", "prompt": [ids]}                              one prompt, one new token
    {"cmd": "quit"}

and answers each with one line, `{"seconds": s, "tokens": n, "first_token_seconds": s, "decode_seconds": s}`, to
which `"ids": true` in the command adds `"ids"`, the new tokens of each prompt. A bad command is answered by
`{"error": ...}`. Sampling is greedy and the end of text is ignored; the key-value cache is emptied before every
command. The log of llama.cpp goes to stderr if `--verbose` is given.

The high-level class of llama-cpp-python runs one sequence only, so this drives llama.cpp's batch interface: one
`llama_decode` a step for all streams (prompts in batches of up to 2,048 tokens), micro-batches of 512, flash
attention.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

BATCH = 2048


class Engine:
    """A model and a context of llama.cpp with room for a number of sequences."""

    def __init__(
        self, gguf: str, streams: int, threads: int, context: int, ubatch: int, unified: bool, verbose: bool
    ) -> None:
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        if not verbose:
            llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context * streams
        params.n_batch = BATCH
        params.n_ubatch = ubatch
        params.n_seq_max = streams
        params.n_threads = threads
        params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = unified
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context")
        self.streams = streams
        self.room = context
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._token = np.ctypeslib.as_array(self.batch.token, (BATCH,))
        self._pos = np.ctypeslib.as_array(self.batch.pos, (BATCH,))
        self._count = np.ctypeslib.as_array(self.batch.n_seq_id, (BATCH,))
        self._logits = np.ctypeslib.as_array(self.batch.logits, (BATCH,))
        # All the one-element lists of sequence ids, gathered so that a step writes them in one go.
        self._sequence = np.zeros(BATCH, np.int32)
        for i in range(BATCH):
            self.batch.seq_id[i] = ctypes.cast(self._sequence.ctypes.data + 4 * i, ctypes.POINTER(ctypes.c_int32))
        self._count[:] = 1

    def dtype(self) -> str:
        """What llama.cpp calls the model's type, such as `llama ?B Q4_1`."""
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.model, text, 256)
        return text.value.decode()

    def _decode(self, count: int) -> None:
        self.batch.n_tokens = count
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")

    def _best(self, row: int) -> np.ndarray:
        """The best token of each of the first `row` rows of logits, which lie one after the other."""
        pointer = llama_cpp.llama_get_logits(self.context)
        logits: np.ndarray = np.ctypeslib.as_array(pointer, (row, self.vocab))
        best: np.ndarray = np.argmax(logits, axis=1)
        return best

    def _prefill(self, prompts: list[list[int]]) -> np.ndarray:
        """Feed all prompts, several to a batch, and return the first new token of each."""
        tokens = np.concatenate([np.asarray(p, np.int32) for p in prompts])
        position = np.concatenate([np.arange(len(p), dtype=np.int32) for p in prompts])
        sequence = np.repeat(np.arange(len(prompts), dtype=np.int32), [len(p) for p in prompts])
        last = np.zeros(len(tokens), np.int8)
        last[np.cumsum([len(p) for p in prompts]) - 1] = 1
        first = np.zeros(len(prompts), np.int32)
        for start in range(0, len(tokens), BATCH):
            part = slice(start, min(start + BATCH, len(tokens)))
            count = part.stop - start
            self._token[:count] = tokens[part]
            self._pos[:count] = position[part]
            self._sequence[:count] = sequence[part]
            self._logits[:count] = last[part]
            self._decode(count)
            ends = sequence[part][last[part] == 1]
            if len(ends):
                first[ends] = self._best(len(ends))
        return first

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Continue all prompts together by `max_tokens` greedy tokens and report the time."""
        if not 1 <= len(prompts) <= self.streams or max_tokens < 1:
            raise ValueError(f"1 to {self.streams} prompts, at least one token")
        if any(not p or len(p) + max_tokens > self.room for p in prompts):
            raise ValueError(f"a prompt is empty or, with its new tokens, longer than {self.room}")
        llama_cpp.llama_memory_clear(self.memory, False)
        count = len(prompts)
        began = time.perf_counter()
        chosen = np.zeros((max_tokens, count), np.int32)
        chosen[0] = self._prefill(prompts)
        first = time.perf_counter()
        self._sequence[:count] = np.arange(count)
        self._pos[:count] = [len(p) for p in prompts]
        self._logits[:count] = 1
        for step in range(1, max_tokens):
            self._token[:count] = chosen[step - 1]
            self._decode(count)
            chosen[step] = self._best(count)
            self._pos[:count] += 1
        ended = time.perf_counter()
        return {
            "seconds": ended - began,
            "tokens": count * max_tokens,
            "first_token_seconds": first - began,
            "decode_seconds": ended - first,
            "ids": chosen.T.tolist(),
        }


def obey(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command."""
    match command.get("cmd"):
        case "streams":
            answer = engine.run(command["prompts"], int(command["max_tokens"]))
        case "generate":
            answer = engine.run([command["prompt"]], int(command["max_tokens"]))
        case "prefill":
            answer = engine.run([command["prompt"]], 1)
        case other:
            raise ValueError(f"no such command: {other}")
    if not command.get("ids"):
        del answer["ids"]
    return answer


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, help="the model")
    parser.add_argument("--streams", type=int, default=16, help="most prompts at the same time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=1152, help="most tokens of a sequence, with the new ones")
    parser.add_argument("--ubatch", type=int, default=512, help="tokens of one micro-batch")
    parser.add_argument("--unified", action="store_true", help="one key-value buffer for all sequences")
    parser.add_argument("--verbose", action="store_true", help="llama.cpp's log on stderr")
    args = parser.parse_args()

    # llama.cpp must not write into the answers: keep stdout for them, and point descriptor 1 at stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    began = time.perf_counter()
    engine = Engine(args.gguf, args.streams, args.threads, args.context, args.ubatch, args.unified, args.verbose)
    warm = [[(7 * i + j) % 1000 + 100 for j in range(64)] for i in range(args.streams)]
    engine.run(warm, 8)
    engine.run(warm[:1], 8)
    say(
        {
            "ready": True,
            "name": "llama.cpp",
            "version": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}",
            "dtype": engine.dtype(),
            "threads": args.threads,
            "load_seconds": time.perf_counter() - began,
            "features": llama_cpp.llama_print_system_info().decode(),
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


if __name__ == "__main__":
    main()

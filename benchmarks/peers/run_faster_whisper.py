"""Measure faster-whisper: a worker that loads a CTranslate2 model once and then obeys JSON commands on stdin, one a line.

Run it with the python of the `faster-whisper` peer environment (see build.sh):

    python run_faster_whisper.py --model-dir DIR [--compute-type int8] [--threads 2]

After loading and a warm-up it prints one line, `{"ready": true, "name": ..., "version": ..., "dtype": ..., ...}`.
Then it takes the commands

    {"cmd": "transcribe", "file": "audio.f32", "mode": "batched"}       several chunks of the file at a time
    {"cmd": "transcribe", "file": "audio.f32", "mode": "sequential"}    one window after the other
    {"cmd": "quit"}

where the file holds float32 samples, 16 kHz mono, and nothing else. Further keys: "batch_size" (8, batched only),
"beam_size" (1), "language" ("en"; null detects), "vad" (true), "word_timestamps" (false), "temperatures" (the library's list),
"carry_text" (true; sequential only: a window's text conditions the next one's),
"timestamps" (true; batched only: off is the library's default and gives no segments within a chunk). The answer is one
line, `{"seconds": s, "audio_seconds": s, "text": ..., "language": ..., "segments": [[start, end, text], ...]}`, where the
seconds count from samples in memory to the last segment; a bad command is answered by `{"error": ...}`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from faster_whisper import BatchedInferencePipeline, WhisperModel

RATE = 16_000
MODES = ("batched", "sequential")


class Engine:
    """One model on the CPU, with both of the library's ways to run it."""

    def __init__(self, model_dir: str, compute_type: str, threads: int) -> None:
        if not Path(model_dir, "model.bin").is_file():  # the library would ask a hub for it
            raise SystemExit(f"{model_dir} holds no model.bin")
        self.model = WhisperModel(
            model_dir, device="cpu", compute_type=compute_type, cpu_threads=threads, num_workers=1
        )
        self.batched = BatchedInferencePipeline(self.model)

    def dtype(self) -> str:
        return str(self.model.model.compute_type)

    def transcribe(self, pcm: np.ndarray, command: dict[str, Any]) -> dict[str, Any]:
        """Transcribe float32 samples [T] and report text and time."""
        mode = command.get("mode", "batched")
        if mode not in MODES:
            raise ValueError(f"mode: one of {', '.join(MODES)}")
        options: dict[str, Any] = {
            "beam_size": int(command.get("beam_size", 1)),
            "language": command.get("language", "en"),
            "vad_filter": bool(command.get("vad", True)),
            "word_timestamps": bool(command.get("word_timestamps", False)),
        }
        if "temperatures" in command:
            options["temperature"] = [float(one) for one in command["temperatures"]]
        transcribe = self.model.transcribe
        if mode == "batched":
            options["batch_size"] = int(command.get("batch_size", 8))
            options["without_timestamps"] = not command.get("timestamps", True)
            transcribe = self.batched.transcribe
        else:
            options["condition_on_previous_text"] = bool(command.get("carry_text", True))
        began = time.perf_counter()
        found, about = transcribe(pcm, **options)
        segments = [[segment.start, segment.end, segment.text] for segment in found]  # runs as it is read
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "audio_seconds": len(pcm) / RATE,
            "text": "".join(text for _, _, text in segments).strip(),
            "language": about.language,
            "segments": segments,
        }


def obey(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command."""
    if command.get("cmd") != "transcribe":
        raise ValueError(f"no such command: {command.get('cmd')}")
    return engine.transcribe(np.fromfile(command["file"], dtype="<f4"), command)


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True, help="a directory with model.bin")
    parser.add_argument("--compute-type", default="int8", help="of CTranslate2 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    # Nobody but us may write into the answers: keep stdout for them, and point descriptor 1 at stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    began = time.perf_counter()
    engine = Engine(args.model_dir, args.compute_type, args.threads)
    noise = np.random.default_rng(0).normal(0, 0.01, 2 * RATE).astype(np.float32)
    for mode in MODES:  # without the voice detector, so that the model itself gets warm
        clip = {"vad_filter": False} if mode == "sequential" else {"clip_timestamps": [{"start": 0.0, "end": 2.0}]}
        transcribe = engine.model.transcribe if mode == "sequential" else engine.batched.transcribe
        list(transcribe(noise, language="en", beam_size=1, temperature=[0.0], max_new_tokens=8, **clip)[0])
    engine.transcribe(noise, {"mode": "sequential"})  # and the voice detector
    say(
        {
            "ready": True,
            "name": "faster-whisper",
            "version": f"faster-whisper {version('faster-whisper')}, ctranslate2 {version('ctranslate2')}",
            "dtype": engine.dtype(),
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
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()

"""Measure OpenVINO GenAI's WhisperPipeline: a worker with the commands of run_faster_whisper.py ("transcribe", "quit").

Run it with the python of the `openvino-whisper` peer environment (see build.sh) on what export_whisper.py wrote:

    python run_openvino_whisper.py --hf-dir DIR [--hint bf16|f32] [--threads 2]

The first run makes OpenVINO's own form of it (optimum-intel, float32; half a minute), kept beside the directory. The pipeline
has one way to do long files: window after window of 30 s, greedy, going on where the last timestamp of a window lies. It has
no voice detector, no batches and no fallback; the command's mode and batch size are ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import openvino_genai

RATE = 16_000
STAMP = "motet-export.sha256"


def exported(source: Path) -> Path:
    """The directory in OpenVINO's form, made anew when the weights changed."""
    out = source.with_name(f"{source.name.removesuffix('-hf')}-openvino")
    want = f"{(source / STAMP).read_text().strip()} {version('optimum-intel')} {version('openvino')}"
    with contextlib.suppress(OSError):
        if (out / STAMP).read_text() == want:
            return out
    from optimum.exporters.openvino import main_export

    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    try:
        main_export(
            model_name_or_path=str(source), output=str(part), task="automatic-speech-recognition-with-past",
            library_name="transformers", convert_tokenizer=True,
        )  # fmt: skip
        shutil.copy(source / "generation_config.json", part)
        (part / STAMP).write_text(want)
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


class Engine:
    def __init__(self, folder: Path, hint: str, threads: int) -> None:
        properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.WhisperPipeline(str(folder), "CPU", **properties)
        self._multilingual = self._pipeline.get_generation_config().is_multilingual

    def transcribe(self, pcm: np.ndarray, language: str) -> dict[str, Any]:
        """Transcribe float32 samples [T] and report text and time."""
        samples = pcm.tolist()  # which is how the pipeline wants them; not its work, so not counted
        options: dict[str, Any] = {"language": f"<|{language}|>", "task": "transcribe"} if self._multilingual else {}
        began = time.perf_counter()
        found = self._pipeline.generate(samples, return_timestamps=True, **options)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "audio_seconds": len(pcm) / RATE,
            "text": str(found.texts[0]).strip(),
            "language": language,
            "segments": [[chunk.start_ts, chunk.end_ts, chunk.text] for chunk in found.chunks or []],
        }


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-dir", type=Path, required=True, help="what export_whisper.py wrote")
    parser.add_argument("--hint", choices=("bf16", "f32"), default="bf16", help="precision it computes in")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    # Nobody but us may write into the answers: keep stdout for them, and point descriptor 1 at stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    began = time.perf_counter()
    engine = Engine(exported(args.hf_dir), args.hint, args.threads)
    engine.transcribe(np.random.default_rng(0).normal(0, 0.1, 2 * RATE).astype(np.float32), "en")
    say(
        {
            "ready": True,
            "name": "OpenVINO GenAI's Whisper",
            "version": f"openvino-genai {version('openvino-genai')}",
            "dtype": args.hint,
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
            if command.get("cmd") != "transcribe":
                raise ValueError(f"no such command: {command.get('cmd')}")
            say(engine.transcribe(np.fromfile(command["file"], dtype="<f4"), command.get("language", "en")))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()

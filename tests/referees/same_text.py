"""A faster-whisper directory, read by us and by faster-whisper: the same text, clip by clip, in greedy search.

    python tests/referees/same_text.py [--speech DIR] [--model NAME ...]

Both engines compute in float32 on the same `model.bin`, without voice detection, fallback and carried-over text. The clips are
motet-demo's ten recordings, alone and joined in twos and threes, or those that DIR/transcripts.tsv lists (file, seconds,
text). Texts may differ for one known reason only, which is shown for each clip where they do: faster-whisper
pads a short clip's spectrogram with zeros, while the reference and we pad its sound with silence. Given 30 s of sound it
pads nothing, so there the texts must be equal. Exit status 0 when they are. Its environment is that of the benchmarks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motet.benchmarks import peer_worker
from motet.benchmarks.asr_claims.setting import read_speech
from motet.benchmarks.motet_recogniser import MotetRecogniser
from motet.benchmarks.peer_worker import PEERS, PeerWorker
from motet.deploy import speech_demo
from motet.engine.config import EngineConfig
from motet.engine.types import TranscribeOptions
from motet.models.registry import resolve

Samples = NDArray[np.float32]
RATE = 16_000
WINDOW = 30 * RATE
MODELS = ("whisper-tiny.en", "whisper-base")
THREADS = 2
GREEDY = TranscribeOptions(language="en", temperatures=(0.0,), vad=False)
AS_WE_DO = {"mode": "sequential", "vad": False, "temperatures": [0.0], "carry_text": False, "beam_size": 1}


@dataclass(frozen=True)
class Verdict:
    """What both said of a clip; and what faster-whisper says when the clip is filled up with silence to 30 s."""

    name: str
    ours: str
    theirs: str
    theirs_filled: str | None = None  # asked for where the texts differ

    @property
    def explained(self) -> bool:
        return self.theirs_filled == self.ours

    def __str__(self) -> str:
        reason = "so says faster-whisper too when the sound is padded, not the spectrogram" if self.explained else (
            f"NOT EXPLAINED: filled up with silence it says {self.theirs_filled!r}"
        )  # fmt: skip
        return f"  {self.name}\n    ours   {self.ours!r}\n    theirs {self.theirs!r}\n    {reason}"


def joined(speech: Sequence[tuple[str, Samples]]) -> list[tuple[str, Samples]]:
    """The recordings, then neighbours joined in twos and threes (at most 30 s)."""
    gap = np.zeros(RATE // 2, np.float32)
    found = list(speech)
    for count in (2, 3):
        for first in range(0, len(speech) - count + 1, count - 1):
            parts = speech[first : first + count]
            pieces = [piece for _, samples in parts for piece in (samples, gap)][:-1]
            found.append((" + ".join(name for name, _ in parts), np.concatenate(pieces)[:WINDOW]))
    return found


class Theirs:
    """faster-whisper, asked for one clip after another."""

    def __init__(self, worker: PeerWorker, folder: Path) -> None:
        self._worker, self._file = worker, folder / "clip.f32"

    def text(self, samples: Samples) -> str:
        samples.astype("<f4").tofile(self._file)
        return str(self._worker.ask({"cmd": "transcribe", "file": str(self._file), **AS_WE_DO}, timeout_s=300)["text"])


def compare(model: str, clips: Sequence[tuple[str, Samples]]) -> list[Verdict]:
    """Both engines' texts of all clips, where they differ."""
    python = peer_worker.build("faster-whisper") / "bin" / "python"
    command = [python, PEERS / "run_faster_whisper.py", "--model-dir", resolve(model).path, "--compute-type", "float32"]
    with MotetRecogniser(model, EngineConfig(dtype="float32", device="cpu"), threads=THREADS) as engine:
        answers, _ = engine.together([samples for _, samples in clips], GREEDY)
    different = []
    with tempfile.TemporaryDirectory() as folder, PeerWorker([*command, "--threads", str(THREADS)]) as worker:
        theirs = Theirs(worker, Path(folder))
        for (name, samples), answer in zip(clips, answers, strict=True):
            text = theirs.text(samples)
            if text != answer.text:
                filled = theirs.text(np.concatenate([samples, np.zeros(max(0, WINDOW - len(samples)), np.float32)]))
                different.append(Verdict(name, answer.text, text, filled))
    return different


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, metavar="DIR", help="other recordings, with a transcripts.tsv")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    options = parser.parse_args(argv)
    speech = read_speech(options.speech) if options.speech else speech_demo.clips()
    clips = [(clip.name, clip.samples) for clip in speech]
    if not options.speech:
        clips = joined(clips)
    held = True
    for model in options.model or MODELS:
        began = time.perf_counter()
        different = compare(model, clips)
        unexplained = sum(not one.explained for one in different)
        held &= not unexplained
        print(
            f"{model}: {len(clips) - len(different)} of {len(clips)} texts equal to faster-whisper's, "
            f"{len(different) - unexplained} more when it pads as we do, {unexplained} not ({time.perf_counter() - began:.0f} s)"
        )
        for verdict in different:
            print(verdict, flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

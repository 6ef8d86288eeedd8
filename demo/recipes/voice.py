"""Make the demo voice from nothing: speech, codec, language model, the folder that ships, its word error rate.

    python demo/recipes/voice.py [--minutes 150] [--hours 12] [--out FOLDER] [--device cuda]

Needs Debian's flite, wordnet-base, bible-kjv and wamerican, and `pip install inflect soxr ninja gguf`. Works in
`$MOTET_CHECKPOINTS/voice` (default ~/.cache/motet/checkpoints/voice) and goes on where it stopped. Of the minutes the codec
gets a tenth, the language model the rest; on a CPU of two or more cores the decoder that ships learns beside it, on CUDA
before it. What 12 hours of speech need besides: some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(HERE / script), *map(str, arguments)]


def main() -> None:
    checkpoints = Path(os.environ.get("MOTET_CHECKPOINTS") or Path.home() / ".cache" / "motet" / "checkpoints")
    parser = argparse.ArgumentParser(description="Make the demo voice.")
    parser.add_argument("--minutes", type=float, default=150.0, help="of training in all (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=12.0, help="of speech to learn from (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=checkpoints / "voice")
    parser.add_argument("--out", type=Path, help="default: FOLDER/motet-voice")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    folder, out = options.folder, options.out or options.folder / "motet-voice"
    cuda = options.device.startswith("cuda")
    codec, decoder = options.minutes * 0.1, options.minutes * (0.25 if cuda else 0.5)
    lm = options.minutes - codec - (decoder if cuda else 0.0)
    device = ("--device", options.device)
    speech = command("voice_speech.py", folder, "--hours", options.hours, "--pronounced", round(3300 * options.hours))
    subprocess.run(speech, check=True)
    first = command("voice_codec.py", folder, "--minutes", codec, "--decoder-minutes", 0, *device)
    subprocess.run(first, check=True)
    threads = () if cuda else ("--threads", max(1, (os.cpu_count() or 2) // 2))
    speaks = command("voice_codec.py", folder, "--minutes", codec, "--decoder-minutes", decoder, *device, *threads)
    reads = command("voice_lm.py", folder, "--minutes", lm, *device, *threads)
    if cuda:
        subprocess.run(speaks, check=True)
        subprocess.run(reads, check=True)
    else:
        with subprocess.Popen(speaks) as beside:
            subprocess.run(reads, check=True)
        if beside.returncode:
            raise SystemExit(beside.returncode)
    subprocess.run(command("voice_pack.py", folder, out), check=True)
    subprocess.run(command("voice_wer.py", out), check=True)


if __name__ == "__main__":
    main()

"""Make the demo picture models from nothing: autoencoder, denoiser, its four-step twin, the folders that ship, their scores.

    python demo/recipes/emoji.py [--minutes 60] [--out FOLDER] [--device cuda] [--threads 2]

Needs npm and `pip install diffusers resvg-py pillow`, and g++ to be fast. Works in `$MOTET_CHECKPOINTS/emoji` (default
~/.cache/motet/checkpoints/emoji) and goes on where it stopped: start it again with the same minutes after a break, or with
more of them to train on a stage that had not ended. Of the minutes the autoencoder gets a sixth, the distillation a fifth, the
denoiser the rest. Compiling, making latents and scoring come on top: some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from emoji_scenes import art_folder

HERE = Path(__file__).parent
CODEC, TURBO = 0.16, 0.2  # of the minutes


def run(script: str, *arguments: object) -> None:
    subprocess.run([sys.executable, str(HERE / script), *map(str, arguments)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo picture models.")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training in all (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=art_folder())
    parser.add_argument("--out", type=Path, help="default: FOLDER/models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--scenes", type=int, default=0, help="as in emoji_denoiser.py")
    parser.add_argument("--no-turbo", action="store_true")
    options = parser.parse_args()
    folder, out = options.folder, options.out or options.folder / "models"
    folder.mkdir(parents=True, exist_ok=True)
    on = ("--device", options.device, "--threads", options.threads)
    kept = (*on, "--scenes", options.scenes)
    turbo = 0.0 if options.no_turbo else TURBO
    run("emoji_codec.py", folder, "--minutes", options.minutes * CODEC, *on)
    run("emoji_denoiser.py", folder, "--minutes", options.minutes * (1 - CODEC - turbo), *kept)
    if turbo:
        run("emoji_turbo.py", folder, "--minutes", options.minutes * turbo, *kept)
    run("emoji_pack.py", folder, out)
    run("emoji_score.py", out / "motet-emoji", "--guidance", 1, 2, 3, "--sheet", out / "motet-emoji.png", *on)
    if turbo:
        run("emoji_score.py", out / "motet-emoji-turbo", "--sheet", out / "motet-emoji-turbo.png", *on)


if __name__ == "__main__":
    main()

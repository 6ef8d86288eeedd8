"""`motet image`: pictures of a prompt as files, or one on stdout, over the SDK.

Knows files and the terminal. Pictures go to files or stdout, everything else to stderr. Files appear whole, and none before all
pictures of the command are made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..engine.config import HostConfig
from ..engine.errors import InvalidRequest
from ..engine.frames import Progress
from ..engine.picture_request import MAX_PICTURES

if TYPE_CHECKING:
    from ..pipelines.image import ImageGeneration
    from ..pipelines.picture_file import PictureFormat
    from ..pipelines.types import ImageEvent, MadePicture

DEFAULT_NAME = "picture"
SUFFIXES: dict[str, PictureFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
_MAX_PROMPT = 1 << 20  # characters of stdin; how long a prompt may be is the model's to say


def run(namespace: argparse.Namespace) -> int:
    """The command. Raises InvalidRequest before a model is loaded where the command cannot work."""
    targets, format = destination(namespace)
    options = _options(namespace)
    prompt = _prompt(namespace.prompt)
    pictures = _load(namespace)
    with pictures.hub:
        bar = ProgressBar(namespace.n, sys.stderr)
        try:
            with pictures.stream(prompt, n=namespace.n, **options) as stream:
                for event in stream:
                    bar.take(event)
            made = stream.result.pictures
        finally:
            bar.clear()
        return _deliver(made, targets, format, namespace.quality, bar)


def destination(namespace: argparse.Namespace) -> tuple[list[Path] | None, PictureFormat]:
    """A file for each picture (None: stdout), and their format. Raises InvalidRequest, where nothing has been done yet."""
    if not 1 <= namespace.n <= MAX_PICTURES:
        raise InvalidRequest(f"image: -n: expected 1 to {MAX_PICTURES}, got {namespace.n}", param="n")
    if namespace.quality is not None and not 0 <= namespace.quality <= 100:
        raise InvalidRequest(f"image: --quality: expected 0 to 100, got {namespace.quality}", param="quality")
    if namespace.output == "-":
        if sys.stdout.isatty():
            raise InvalidRequest("image: -o - writes a picture to stdout, which is a terminal; pipe it, or name a file")
        if namespace.n > 1:
            raise InvalidRequest("image: stdout holds one picture; name a file for several")
        return None, _format(namespace, "png")
    if namespace.output is None:
        format = _format(namespace, "png")
        return _free_names(format, namespace.n), format
    target = Path(namespace.output)
    if target.is_dir():
        raise InvalidRequest(f"image: -o {target} is a folder")
    if not target.parent.is_dir():
        raise InvalidRequest(f"image: there is no folder {target.parent}")
    if namespace.format is None and target.suffix.lower() not in SUFFIXES:
        raise InvalidRequest(f"image: a picture's file ends in {', '.join(SUFFIXES)}, got {target.name!r}")
    format = _format(namespace, SUFFIXES.get(target.suffix.lower(), "png"))
    if namespace.n == 1:
        return [target], format
    return [target.with_name(f"{target.stem}-{number}{target.suffix}") for number in range(1, namespace.n + 1)], format


def _format(namespace: argparse.Namespace, default: PictureFormat) -> PictureFormat:
    """What is written. Raises InvalidRequest for a quality that it has no use for."""
    format: PictureFormat = namespace.format or default
    if format == "png" and namespace.quality is not None:
        raise InvalidRequest("image: --quality has no effect on png, which keeps every pixel", param="quality")
    return format


def _free_names(format: str, count: int) -> list[Path]:
    """picture.png, or with numbers behind it: nothing that is there is written over unasked."""
    suffix = {"jpeg": "jpg"}.get(format, format)
    if count == 1 and not (plain := Path(f"{DEFAULT_NAME}.{suffix}")).exists():
        return [plain]
    first = 1 if count > 1 else 2
    while True:
        names = [Path(f"{DEFAULT_NAME}-{number}.{suffix}") for number in range(first, first + count)]
        taken = [at for at, name in enumerate(names) if name.exists()]
        if not taken:
            return names
        first += taken[-1] + 1


def _prompt(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.read(_MAX_PROMPT)
        except (OSError, ValueError) as error:  # ValueError: bytes that are no text
            raise InvalidRequest(f"image: stdin cannot be read as text ({type(error).__name__})") from None
    if not text.strip():
        raise InvalidRequest("image: there is no prompt", param="prompt")
    return text.strip()


def _deliver(
    made: Sequence[MadePicture],
    targets: list[Path] | None,
    format: PictureFormat,
    quality: int | None,
    bar: ProgressBar,
) -> int:
    """Encode and write. A file that cannot be written ends it with exit status 1."""
    import numpy as np

    from ..pipelines.picture_file import encode

    for number, picture in enumerate(made):
        data = encode(np.asarray(picture.image), format, 95 if quality is None else quality)
        where = ""
        if targets is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            try:
                _write(targets[number], data)
            except OSError as error:
                _tell(f"{targets[number]}: {error.strerror or error}")
                return 1
            where = f"{targets[number]}: "
        _tell(f"{where}{picture.image.width}x{picture.image.height}, seed {picture.seed}")
    _tell(bar.summary())
    return 0


def _write(target: Path, data: bytes) -> None:
    """A file, whole or not at all. Raises OSError."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


class ProgressBar:
    """Steps done of all pictures, on one line of a terminal; elsewhere a line per quarter."""

    WIDTH = 24

    def __init__(self, num_pictures: int, out: TextIO) -> None:
        self.num_pictures = num_pictures
        self.num_done = 0
        self.num_steps = 0  # of one picture
        self._out = out
        self._live = out.isatty()
        self._started = time.monotonic()
        self._steps: dict[int, int] = {}
        self._quarter = 0

    def take(self, event: ImageEvent) -> None:
        from ..pipelines.types import ImageProgress

        if isinstance(event, ImageProgress):
            self._steps[event.index], self.num_steps = event.step, event.num_steps
        else:
            self.num_done += 1
            self._steps[event.index] = self.num_steps
        if self._live:
            self._print(f"\r\x1b[K{self.line()}")
        elif (quarter := int(4 * self.share())) > self._quarter:
            self._quarter = quarter
            self._print(f"motet: {25 * quarter} % after {time.monotonic() - self._started:.1f} s\n")

    def share(self) -> float:
        return sum(self._steps.values()) / max(1, self.num_steps * self.num_pictures)

    def line(self) -> str:
        filled = int(self.WIDTH * self.share())
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        steps = f"step {sum(self._steps.values())}/{self.num_steps * self.num_pictures}"
        pictures = f"  {self.num_done}/{self.num_pictures} pictures" if self.num_pictures > 1 else ""
        return f"[{bar}] {100 * self.share():3.0f} %  {steps}{pictures}  {time.monotonic() - self._started:.1f} s"

    def clear(self) -> None:
        if self._live:
            self._print("\r\x1b[K")

    def summary(self) -> str:
        what = "a picture" if self.num_pictures == 1 else f"{self.num_pictures} pictures"
        return f"{what} of {self.num_steps} steps in {time.monotonic() - self._started:.1f} s"

    def _print(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._out.write(text)
            self._out.flush()


def _load(namespace: argparse.Namespace) -> ImageGeneration:
    """Load the model, saying so on stderr. The caller closes its hub."""
    from ..pipelines.hub import Hub, default_model
    from ..pipelines.image import ImageGeneration

    started = time.monotonic()
    model = namespace.model or default_model("image")
    hub = Hub(HostConfig(models=(model,), threads=namespace.threads), on_progress=_tell_progress)
    try:
        pictures = ImageGeneration(model, hub=hub)
    except BaseException:
        hub.close()
        raise
    _tell(f"{model} is ready after {time.monotonic() - started:.1f} s")
    return pictures


def _options(namespace: argparse.Namespace) -> Any:
    """Keywords of the SDK. Raises InvalidRequest for what is wrong with any model."""
    from ..pipelines.image import parse_size

    parse_size(namespace.size)
    if namespace.steps is not None and namespace.steps < 1:
        raise InvalidRequest(f"steps: expected 1 or more, got {namespace.steps}", param="steps")
    if namespace.image is None and namespace.strength is not None:
        raise InvalidRequest("strength: expected with --image, got none", param="strength")
    if namespace.image is not None and not Path(namespace.image).is_file():
        raise InvalidRequest(f"image: there is no file {namespace.image}", param="image")
    given = {
        "negative_prompt": namespace.negative,
        "size": namespace.size,
        "steps": namespace.steps,
        "guidance_scale": namespace.guidance,
        "seed": namespace.seed,
        "solver": namespace.solver,
        "image": namespace.image,
        "strength": namespace.strength,
    }
    return {name: value for name, value in given.items() if value is not None}


def _tell(line: str) -> None:
    print(f"motet: {line}", file=sys.stderr, flush=True)


def _tell_progress(progress: Progress) -> None:
    _tell(f"{progress.model}: {progress.phase} ({progress.seconds:.1f} s)")

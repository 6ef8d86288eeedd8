"""`motet speak`: text from the command line or stdin as a sound file, or as sound on stdout, over the SDK.

Text from stdin is spoken while it comes, so that `motet chat | motet speak - -o - | aplay` works. Sound goes to a file or stdout,
everything else to stderr.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..engine.config import HostConfig
from ..engine.errors import InvalidRequest
from ..engine.frames import Progress

if TYPE_CHECKING:
    from ..pipelines.sound_file import SoundFormat
    from ..pipelines.speech import Speech, SpeechStream

DEFAULT_NAME = "speech"
_PIECE = 4000  # characters of a long text that are handed over at a time


def run(namespace: argparse.Namespace) -> int:
    """The command. Raises InvalidRequest before a model is loaded where the command cannot work."""
    if namespace.list_voices:
        with _load(namespace) as speech:
            print("\n".join(speech.voices))
        return 0
    target, format = destination(namespace)
    ended = threading.Event()
    text = None if namespace.text == "-" else namespace.text
    if text is not None and not text.strip():
        raise InvalidRequest("speak: there is no text")
    speech = _load(namespace)
    with speech.hub:
        source = _lines(sys.stdin, ended) if text is None else text if len(text) <= _PIECE else _pieces(text)
        stream = speech.stream(source, **_options(namespace))
        try:
            with stream:
                if target is None:
                    write_stream(sys.stdout.buffer, stream, format)
                else:
                    from ..pipelines.sound_file import write_file

                    write_file(target, (piece.pcm for piece in stream), format)
        except BrokenPipeError:
            raise
        except OSError as error:
            _tell(f"{target or 'stdout'}: {error.strerror or error}")
            return 1
        finally:
            ended.set()
        result = stream.result
    where = "" if target is None else f"{target}: "
    _tell(
        f"{where}{result.duration:.1f} s of speech in {result.timing.total_s:.1f} s, "
        f"the first after {1000 * result.timing.first_audio_s:.0f} ms"
    )
    return 0


def destination(namespace: argparse.Namespace) -> tuple[Path | None, SoundFormat]:
    """Where the sound goes (None: stdout) and as what. Raises InvalidRequest, where nothing has been done yet."""
    from ..pipelines.sound_file import TimeStretch, format_of

    TimeStretch(namespace.speed)
    if namespace.output == "-":
        if sys.stdout.isatty():
            raise InvalidRequest("speak: -o - writes sound to stdout, which is a terminal; pipe it, or name a file")
        return None, namespace.format or "pcm"
    if namespace.output is None:
        return _free_name(namespace.format or "wav"), namespace.format or "wav"
    target = Path(namespace.output)
    if target.is_dir():
        raise InvalidRequest(f"speak: -o {target} is a folder")
    if not target.parent.is_dir():
        raise InvalidRequest(f"speak: there is no folder {target.parent}")
    return target, namespace.format or format_of(target)


def write_stream(out: IO[bytes], stream: SpeechStream, format: SoundFormat) -> None:
    """Sound to a pipe, as soon as it is there."""
    from ..pipelines.sound_file import sound_encoder

    encoder = sound_encoder(format)
    try:
        for piece in stream:
            out.write(encoder.feed(piece.pcm))
            out.flush()
        out.write(encoder.finish())
        out.flush()
    finally:
        encoder.close()


def _free_name(format: str) -> Path:
    """speech.wav, or with a number behind it: nothing that is there is written over unasked."""
    target, number = Path(f"{DEFAULT_NAME}.{format}"), 2
    while target.exists():
        target, number = Path(f"{DEFAULT_NAME}-{number}.{format}"), number + 1
    return target


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def _lines(file: IO[str], ended: threading.Event) -> Iterator[str]:
    """Lines as they come. Nobody waits for a line that never comes once `ended` is set."""
    found: queue.Queue[str | BaseException] = queue.Queue(maxsize=64)

    def read() -> None:
        try:
            for line in iter(lambda: file.readline(_PIECE), ""):
                found.put(line)
            found.put("")
        except (OSError, ValueError) as error:  # ValueError: bytes that are no text
            found.put(error)

    # A daemon: a read that waits for a person cannot be interrupted, and shall not keep the process alive.
    threading.Thread(target=read, name="motet-stdin", daemon=True).start()
    while not ended.is_set():
        try:
            line = found.get(timeout=0.1)
        except queue.Empty:
            continue
        if isinstance(line, BaseException):
            raise InvalidRequest(f"speak: stdin cannot be read as text ({type(line).__name__})")
        if not line:
            return
        yield line


def _load(namespace: argparse.Namespace) -> Speech:
    """Load the voice, saying so on stderr. The caller closes its hub."""
    from ..pipelines.hub import Hub, default_model
    from ..pipelines.speech import Speech

    started = time.monotonic()
    model = namespace.model or default_model("tts")
    hub = Hub(HostConfig(models=(model,), threads=namespace.threads), on_progress=_tell_progress)
    try:
        speech = Speech(model, hub=hub)
    except BaseException:
        hub.close()
        raise
    _tell(f"{model} is ready after {time.monotonic() - started:.1f} s")
    return speech


def _options(namespace: argparse.Namespace) -> Any:
    given = {"voice": namespace.voice, "speed": namespace.speed, "seed": namespace.seed}
    if namespace.temperature is not None:
        given["temperature"] = namespace.temperature
    return given


def _tell(line: str) -> None:
    print(f"motet: {line}", file=sys.stderr, flush=True)


def _tell_progress(progress: Progress) -> None:
    _tell(f"{progress.model}: {progress.phase} ({progress.seconds:.1f} s)")

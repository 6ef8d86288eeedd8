"""`motet transcribe`: files, folders or a microphone as text, subtitles or JSON, over the SDK.

Knows files, formats and the terminal. Results go to stdout or into a folder, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..engine.config import HostConfig
from ..engine.errors import InvalidRequest, MotetError
from ..engine.frames import Progress

if TYPE_CHECKING:
    from ..pipelines.transcription import Transcription
    from ..pipelines.types import Transcript, TranscriptionOptions

FORMATS = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}
# What is taken from a folder; a file that is named itself may be of any kind.
SUFFIXES = frozenset(
    ".3gp .aac .ac3 .aif .aiff .amr .avi .flac .flv .g722 .m4a .m4b .mka .mkv .mov .mp2 .mp3 .mp4 .mpeg .mpg .mpga .oga .ogg "
    ".opus .ts .wav .webm .wma .wmv".split()
)
NUM_TOGETHER = 8  # files that are read and recognised at a time


@dataclass(frozen=True, kw_only=True)
class Job:
    """One file to be transcribed and where its result goes (None: stdout)."""

    source: Path
    target: Path | None


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a result is written."""

    format: str
    max_chars: int = 0

    def write(self, transcript: Transcript, source: Path, *, named: bool) -> str:
        """The text of a result, with a line break at its end. `named`: results of several files follow each other."""
        match self.format:
            case "srt":
                return transcript.to_srt(max_chars=self.max_chars)
            case "vtt":
                return transcript.to_vtt(max_chars=self.max_chars)
            case "json":
                if not named:
                    return transcript.to_json(indent=2) + "\n"
                found = {"file": str(source), **json.loads(transcript.to_json())}  # one line each
                return json.dumps(found, ensure_ascii=False) + "\n"
        said = [segment.speaker for segment in transcript.segments]
        text = transcript.text if not any(said) else _turns(transcript)
        return f"== {source} ==\n{text}\n" if named else f"{text}\n"


def run(namespace: argparse.Namespace) -> int:
    """The command; exit status 1 when a file could not be transcribed, the others are."""
    style = Style(format=namespace.format, max_chars=namespace.max_chars)
    if namespace.mic:
        from ..pipelines.microphone import microphone

        pieces = microphone()  # says that there is none before a model is loaded
        transcription = _load(namespace)
        with transcription.hub:
            return listen(transcription, pieces, _options(namespace, style), sys.stdout)
    jobs = plan(namespace.file, namespace.output, FORMATS[style.format])
    if namespace.output is None and len(jobs) > 1 and style.format in ("srt", "vtt"):
        raise InvalidRequest(f"--format {style.format} of {len(jobs)} files wants --output DIR")
    transcription = _load(namespace)
    with transcription.hub:
        return transcribe(transcription, jobs, _options(namespace, style), style)


def plan(names: Sequence[str], output: Path | None, suffix: str) -> list[Job]:
    """The files behind names: folders are searched to their ends. Raises InvalidRequest where there is nothing."""
    found: list[tuple[Path, Path]] = []  # source, and the name that its result bears
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(
                file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            )
            if not inside:
                raise InvalidRequest(f"no audio or video in the folder {name}")
            found += [(file, file.relative_to(path)) for file in inside if file.is_file()]
        elif path.exists():
            found.append((path, Path(path.name)))
        else:
            raise InvalidRequest(f"no file or folder {name}")
    if output is None:
        return [Job(source=source, target=None) for source, _ in found]
    stems = [relative.with_suffix("") for _, relative in found]
    jobs: list[Job] = []
    taken: set[Path] = set()
    for (source, relative), stem in zip(found, stems):
        # Two results of one name: a.mp3 and a.wav become a.mp3.srt and a.wav.srt, further ones get numbers.
        bare = relative if stems.count(stem) > 1 else stem
        target, number = output / f"{bare}{suffix}", 2
        while target in taken:
            target, number = output / f"{bare}-{number}{suffix}", number + 1
        taken.add(target)
        jobs.append(Job(source=source, target=target))
    return jobs


def transcribe(transcription: Transcription, jobs: Sequence[Job], options: TranscriptionOptions, style: Style) -> int:
    """All files, several at a time; results leave in the order of the files."""
    bar = ProgressBar(len(jobs), sys.stderr)
    executor = ThreadPoolExecutor(NUM_TOGETHER, thread_name_prefix="motet-file")
    waiting: list[Future[Transcript]] = []
    num_failed = 0
    try:
        waiting = [executor.submit(_one, transcription, job, options, bar) for job in jobs]
        for number, (job, future) in enumerate(zip(jobs, waiting)):
            while not future.done():
                wait([future], timeout=0.2, return_when=FIRST_COMPLETED)
                bar.draw()
            try:
                text = style.write(future.result(), job.source, named=len(jobs) > 1)
                waiting[number] = Future()  # a long list of files is not a long list of results
                _deliver(text, job.target, bar)
            except (MotetError, OSError) as error:
                num_failed += 1
                bar.say(f"motet: {job.source}: {error}")
        bar.finish()
    except KeyboardInterrupt:
        bar.clear()
        print(f"motet: interrupted after {bar.num_done} of {len(jobs)} files", file=sys.stderr)
        raise
    finally:
        for future in waiting:
            future.cancel()
        transcription.hub.close()  # whoever still waits for the engine waits no longer
        executor.shutdown(cancel_futures=True)
    return 1 if num_failed else 0


def listen(transcription: Transcription, pieces: Iterator[bytes], options: TranscriptionOptions, out: TextIO) -> int:
    """Text of live audio as it is spoken, until its end or Ctrl-C. In a terminal, text that may still change is grey."""
    from ..engine.types import Segment
    from ..pipelines.types import PartialText

    live = out.isatty()
    print("motet: listening; Ctrl-C ends it", file=sys.stderr, flush=True)
    options = {**options, "partial_s": 1.0 if live else 0.0}
    said = ""
    with _first_interrupt() as ended, transcription.stream(_until(ended, pieces), **options) as stream:
        for event in stream:
            if isinstance(event, Segment):
                line = f"{event.speaker}: {event.text.strip()}" if event.speaker else event.text.strip()
                out.write(f"\r\x1b[K{line}\n" if live else f"{line}\n")
                said = ""
            elif isinstance(event, PartialText) and live:
                said += event.committed
                out.write(f"\r\x1b[K{said.strip()}\x1b[2m{event.tentative}\x1b[0m")
            out.flush()
    return 0


@contextlib.contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C, so that what was said until then is still written; a second one ends it at once."""
    ended = threading.Event()

    def interrupted(number: int, frame: object) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield ended
    finally:
        signal.signal(signal.SIGINT, before)


def _until(ended: threading.Event, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        if ended.is_set():
            return


class ProgressBar:
    """Seconds of audio done of those known so far, on one line of a terminal; elsewhere a line per file."""

    WIDTH = 24

    def __init__(self, num_files: int, out: TextIO) -> None:
        self.num_files = num_files
        self.num_done = 0
        self._out = out
        self._live = out.isatty()
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._lengths: dict[Path, float] = {}
        self._done: dict[Path, float] = {}

    def begin(self, source: Path, duration: float) -> None:
        with self._lock:
            self._lengths[source], self._done[source] = duration, 0.0

    def advance(self, source: Path, seconds: float) -> None:
        with self._lock:
            self._done[source] = min(max(seconds, self._done[source]), self._lengths[source])

    def end(self, source: Path, *, well: bool) -> None:
        with self._lock:
            self.num_done += 1
            self._done[source] = self._lengths.get(source, 0.0)
            if not self._live and self.num_files > 1 and well:
                self._print(f"motet: {source} ({self.num_done} of {self.num_files})\n")

    def line(self) -> str:
        """The bar: files that are still to be opened count as long as the mean of those that were."""
        done, known = sum(self._done.values()), sum(self._lengths.values())
        total = known * self.num_files / max(1, len(self._lengths))
        share = done / total if total else 0.0
        filled = int(self.WIDTH * share)
        elapsed = time.monotonic() - self._started
        speed = f"{done / elapsed:.1f}x" if elapsed > 0.5 and done else "-"
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        return f"[{bar}] {100 * share:3.0f} %  {self.num_done}/{self.num_files} files  {_minutes(done)}  {speed}"

    def draw(self) -> None:
        if self._live:
            with self._lock:
                self._print(f"\r\x1b[K{self.line()}")

    def say(self, line: str) -> None:
        with self._lock:
            self._print(f"\r\x1b[K{line}\n" if self._live else f"{line}\n")

    def clear(self) -> None:
        if self._live:
            self._print("\r\x1b[K")

    def finish(self) -> None:
        self.clear()
        seconds, elapsed = sum(self._done.values()), time.monotonic() - self._started
        if seconds:
            speed = f"{seconds / elapsed:.1f} times real time" if elapsed > 0 else "at once"
            self._print(f"motet: {_minutes(seconds)} of audio in {elapsed:.1f} s ({speed})\n")

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _one(transcription: Transcription, job: Job, options: TranscriptionOptions, bar: ProgressBar) -> Transcript:
    """One file; runs in a thread."""
    well = False
    try:
        with transcription.stream(job.source, **options) as stream:
            bar.begin(job.source, stream.duration or 0.0)
            for event in stream:
                bar.advance(job.source, getattr(event, "end", 0.0))
            result = stream.result
        well = True
        return result
    except CancelledError:
        raise InvalidRequest("interrupted") from None
    finally:
        bar.end(job.source, well=well)


def _deliver(text: str, target: Path | None, bar: ProgressBar) -> None:
    """Write a result; a file appears whole or not at all."""
    if target is None:
        bar.clear()
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _turns(transcript: Transcript) -> str:
    """One line for each turn of a speaker."""
    lines: list[str] = []
    before: str | None = None
    for segment in transcript.segments:
        if not lines or segment.speaker != before:
            lines.append(f"{segment.speaker or '?'}:")
            before = segment.speaker
        lines[-1] += " " + segment.text.strip()
    return "\n".join(lines)


def _load(namespace: argparse.Namespace) -> Transcription:
    """Load the model, saying so on stderr. The caller closes its hub."""
    from ..pipelines.hub import Hub, default_model
    from ..pipelines.transcription import Transcription

    started = time.monotonic()
    model = namespace.model or default_model("asr")
    hub = Hub(HostConfig(models=(model,), threads=namespace.threads), on_progress=_tell_progress)
    try:
        transcription = Transcription(model, hub=hub)
    except BaseException:
        hub.close()
        raise
    _tell(f"{model} is ready after {time.monotonic() - started:.1f} s")
    return transcription


def _options(namespace: argparse.Namespace, style: Style) -> TranscriptionOptions:
    given: dict[str, Any] = {
        "task": "translate" if namespace.translate else "transcribe",
        "language": namespace.language,
        "prompt": namespace.prompt,
        "diarize": namespace.diarize,
        "word_timestamps": namespace.word_timestamps or (style.max_chars > 0 and style.format in ("srt", "vtt")),
    }
    return given  # type: ignore[return-value]


def _tell(line: str) -> None:
    print(f"motet: {line}", file=sys.stderr, flush=True)


def _tell_progress(progress: Progress) -> None:
    _tell(f"{progress.model}: {progress.phase} ({progress.seconds:.1f} s)")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

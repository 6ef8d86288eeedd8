"""Speech as a sound file, while it is made: 16-bit PCM goes in piece by piece, bytes of wav, mp3, opus, aac, flac or raw PCM come
out at once. Also `TimeStretch`: faster or slower at the same pitch. Through PyAV (FFmpeg); no torch; one thread at a time.

A file that is written while its length is unknown says so in its header (WAV: sizes 0xFFFFFFFF); `encode` and `write_file` know
the whole and write it down. MP3 and AAC begin with some 50 ms of silence of their codec; files of `write_file` say so, streams
cannot.
"""

from __future__ import annotations

import io
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, get_args

import av
import av.error
import av.filter
import numpy as np

from ..engine.errors import InvalidRequest

RATE = 24_000  # of all speech that is made, in Hz; mono
SoundFormat: TypeAlias = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMATS: tuple[SoundFormat, ...] = get_args(SoundFormat)
CONTENT_TYPES: dict[SoundFormat, str] = {
    **{"mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac"},
    **{"flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm"},
}
SLOWEST, FASTEST = 0.25, 4.0
_SUFFIXES: dict[str, SoundFormat] = {".ogg": "opus", ".oga": "opus", ".raw": "pcm"}
_UNKNOWN = 0xFFFFFFFF

# Container, codec, bits per second, options of the container. A packet leaves as soon as it is there.
_CODECS: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "mp3": ("mp3", "libmp3lame", 64_000, {}),
    "opus": ("ogg", "libopus", 40_000, {"page_duration": "100000"}),
    "aac": ("adts", "aac", 64_000, {}),
    "flac": ("flac", "flac", 0, {}),
}


class SoundEncoder(ABC):
    """PCM (16-bit little-endian, mono, 24 kHz) in pieces of any size -> the bytes of a file. Not to be used after `finish`."""

    @abstractmethod
    def feed(self, pcm: bytes) -> bytes:
        """More sound -> what is complete of the file, maybe nothing yet."""

    @abstractmethod
    def finish(self) -> bytes:
        """The sound is over: the rest of the file."""

    @abstractmethod
    def close(self) -> None:
        """Let go without finishing. Closing twice, or after `finish`, is fine."""


def sound_encoder(format: SoundFormat, *, speed: float = 1.0) -> SoundEncoder:
    """The encoder for a stream. Raises InvalidRequest for an unknown format (param "response_format") or speed ("speed")."""
    stretch = TimeStretch(speed)
    encoder: SoundEncoder
    match check_format(format):
        case "wav":
            encoder = _WavEncoder()
        case "pcm":
            encoder = _RawEncoder()
        case _:
            encoder = _CodecEncoder(format, _Sink())
    return encoder if speed == 1 else _Stretched(stretch, encoder)


def check_format(format: str) -> SoundFormat:
    """The format if it is one. Raises InvalidRequest."""
    for known in FORMATS:
        if format == known:
            return known
    raise InvalidRequest(
        f"response_format: expected one of {', '.join(FORMATS)}, got {str(format)[:40]!r}", param="response_format"
    )


def format_of(path: str | os.PathLike[str]) -> SoundFormat:
    """The format that a file's name asks for. Raises InvalidRequest for an unknown ending."""
    suffix = Path(path).suffix.lower()
    for known in FORMATS:
        if suffix == f".{known}":
            return known
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    endings = ", ".join(f".{known}" for known in FORMATS)
    raise InvalidRequest(f"a sound file ends in {endings} or .ogg, got {Path(path).name!r}", param="path")


def encode(pcm: bytes, format: SoundFormat, *, speed: float = 1.0) -> bytes:
    """A whole sound as the bytes of a file, whose header knows its length."""
    file = io.BytesIO()
    write_sound(file, [pcm], format, speed=speed)
    return file.getvalue()


def write_file(path: str | os.PathLike[str], pieces: Iterable[bytes], format: SoundFormat | None = None) -> None:
    """Sound as a file of `format` (None: by the name's ending). It appears whole or not at all. Raises OSError."""
    target = Path(path)
    known = format_of(path) if format is None else check_format(format)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            write_sound(file, pieces, known)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_sound(file: IO[bytes], pieces: Iterable[bytes], format: SoundFormat, *, speed: float = 1.0) -> None:
    """Sound into a file that can be sought: its header is written last. `pieces` are taken one by one."""
    stretch = TimeStretch(speed)
    encoder: SoundEncoder
    match check_format(format):
        case "wav":
            encoder = _WavEncoder()
        case "pcm":
            encoder = _RawEncoder()
        case _:
            encoder = _CodecEncoder(format, file)
    if speed != 1:
        encoder = _Stretched(stretch, encoder)
    try:
        for piece in pieces:
            file.write(encoder.feed(piece))
        file.write(encoder.finish())
    finally:
        encoder.close()
    if format == "wav":
        num_bytes = file.tell() - 44
        file.seek(0)
        file.write(wav_header(num_bytes))
        file.seek(0, io.SEEK_END)


def wav_header(num_bytes: int | None) -> bytes:
    """44 bytes in front of so many bytes of samples; None: nobody knows how many."""
    riff, data = (_UNKNOWN, _UNKNOWN) if num_bytes is None else (36 + num_bytes, num_bytes)
    about = struct.pack("<IHHIIHH", 16, 1, 1, RATE, RATE * 2, 2, 16)
    return b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + about + b"data" + struct.pack("<I", data)


class TimeStretch:
    """Speech faster or slower without a change of pitch. Bytes of PCM in and out; `speed` 1 changes nothing.

    The length of all that comes out is that of all that went in, divided by the speed, to the sample.
    """

    def __init__(self, speed: float) -> None:
        """Raises InvalidRequest unless 0.25 <= speed <= 4."""
        if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not SLOWEST <= speed <= FASTEST:
            raise InvalidRequest(f"speed: expected {SLOWEST} to {FASTEST:g}, got {speed!r:.40}", param="speed")
        self.speed = float(speed)
        self._half = b""
        self._num_in = self._num_out = 0
        self._graph = None if self.speed == 1 else _tempo_graph(self.speed)

    def feed(self, pcm: bytes) -> bytes:
        pcm, self._half = _whole_samples(self._half, pcm)
        if self._graph is None or not pcm:
            return pcm
        self._graph.push(_frame(pcm, self._num_in))
        self._num_in += len(pcm) // 2
        return self._pull()

    def finish(self) -> bytes:
        if self._graph is None or not self._num_in:
            return b""
        self._graph.push(None)
        # The filter ends a few milliseconds early or late.
        missing = round(self._num_in / self.speed) - self._num_out
        rest = self._pull()[: 2 * max(missing, 0)]
        self._graph = None
        return rest + bytes(2 * max(missing, 0) - len(rest))

    def _pull(self) -> bytes:
        assert self._graph is not None
        parts: list[bytes] = []
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                break
            assert isinstance(frame, av.AudioFrame)
            parts.append(frame.to_ndarray().astype("<i2", copy=False).tobytes())
        out = b"".join(parts)
        self._num_out += len(out) // 2
        return out


# --------------------------------------------------------------------------------------------------------- mechanism


class _RawEncoder(SoundEncoder):
    def feed(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


class _WavEncoder(_RawEncoder):
    def __init__(self) -> None:
        self._header = wav_header(None)

    def feed(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.feed(b"")


class _Sink:
    """What a container writes into where nobody can seek."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        out = bytes(self._bytes)
        self._bytes.clear()
        return out


class _CodecEncoder(SoundEncoder):
    """A codec of FFmpeg in a container of its. Into a `_Sink` the bytes come back from `feed`; into a file they go there."""

    def __init__(self, format: SoundFormat, file: _Sink | IO[bytes]) -> None:
        container, codec, bit_rate, options = _CODECS[format]
        self._sink = file if isinstance(file, _Sink) else None
        self._half = b""
        self._num_in = 0
        if self._sink is not None:
            options = {**options, "flush_packets": "1"}
            if format == "mp3":
                options |= {"write_xing": "0", "id3v2_version": "0"}  # a length that is not known
        self._container = av.open(file, "w", format=container, options=options)
        stream: Any = self._container.add_stream(codec, rate=RATE, layout="mono")
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        if bit_rate:
            self._stream.codec_context.bit_rate = bit_rate
        self._stream.codec_context.thread_count = 1

    def feed(self, pcm: bytes) -> bytes:
        pcm, self._half = _whole_samples(self._half, pcm)
        if pcm:
            self._container.mux(self._stream.encode(_frame(pcm, self._num_in)))
            self._num_in += len(pcm) // 2
        return self._take()

    def finish(self) -> bytes:
        if not self._num_in:
            self.feed(bytes(2))  # a file without any sound is none
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._take()

    def close(self) -> None:
        self._container.close()

    def _take(self) -> bytes:
        return self._sink.take() if self._sink is not None else b""


class _Stretched(SoundEncoder):
    def __init__(self, stretch: TimeStretch, encoder: SoundEncoder) -> None:
        self._stretch, self._encoder = stretch, encoder

    def feed(self, pcm: bytes) -> bytes:
        return self._encoder.feed(self._stretch.feed(pcm))

    def finish(self) -> bytes:
        return self._encoder.feed(self._stretch.finish()) + self._encoder.finish()

    def close(self) -> None:
        self._encoder.close()


def _whole_samples(half: bytes, pcm: bytes) -> tuple[bytes, bytes]:
    data = half + pcm if half else pcm
    whole = len(data) & ~1
    return data[:whole], data[whole:]


def _frame(pcm: bytes, at: int) -> av.AudioFrame:
    samples = np.frombuffer(pcm, "<i2").astype(np.int16, copy=False)[None]
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
    frame.sample_rate = RATE
    frame.time_base = Fraction(1, RATE)
    frame.pts = at
    return frame


def _tempo_graph(speed: float) -> av.filter.Graph:
    """FFmpeg's atempo, several in a row where one alone would leave samples out (above 2) or is not allowed (below 0.5)."""
    num = max(1, math.ceil(abs(math.log2(speed))))
    graph = av.filter.Graph()
    last: Any = graph.add_abuffer(sample_rate=RATE, format="s16", layout="mono", time_base=Fraction(1, RATE))
    for _ in range(num):
        tempo = graph.add("atempo", f"{speed ** (1 / num):.9f}")
        last.link_to(tempo)
        last = tempo
    sink = graph.add("abuffersink")
    last.link_to(sink)
    graph.configure()
    return graph

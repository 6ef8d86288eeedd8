"""Sound files and PCM: any container and codec that FFmpeg reads (through PyAV) -> 16 kHz mono, under limits.

Nothing in a header is believed: bytes, seconds and samples are counted while they come. Containers that name other files
or addresses are refused, and whatever a file asks to be opened is not. No torch; runs in any thread, holds one block.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, TypeAlias

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from ..engine.errors import InvalidRequest

SAMPLE_RATE = 16000
MIN_RATE, MAX_RATE = 1000, 768000  # of what is decoded, in Hz
Samples: TypeAlias = NDArray[np.float32]
Encoding: TypeAlias = Literal["f32", "s16"]
Source: TypeAlias = bytes | bytearray | memoryview | str | Path | BinaryIO

_MAX_CHANNELS = 64
_MAX_DAMAGED = 1000  # packets in a row that cannot be decoded before the rest is given up
# They read other files, addresses or devices; "image2" globs a directory.
_REFERRING = {
    *("hls", "dash", "concat", "sdp", "rtsp", "rtp", "sap", "imf", "lavfi", "image2", "webm_dash_manifest", "tee"),
    *("hds", "smoothstreaming", "vobsub", "ffmetadata", "alsa", "oss", "fbdev", "kmsgrab", "x11grab", "avs", "bluray"),
    *("video4linux2,v4l2", "pulse", "jack", "sndio", "iec61883", "libcdio", "dshow", "avfoundation", "whip"),
}


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What one file may cost. `max_pcm_bytes` bounds what is kept (4 bytes a sample as "f32", 2 as "s16")."""

    max_input_bytes: int = 1 << 30
    max_seconds: float = 6 * 3600.0
    max_pcm_bytes: int = 3 << 29  # 1.6 GB: 6.9 hours of f32


class DecodingStopped(Exception):
    """The caller's `stop` said so."""


Stop: TypeAlias = Callable[[], bool]


def decode_audio(source: Source, limits: MediaLimits | None = None, *, stop: Stop | None = None) -> Samples:
    """The sound in bytes or a file, whole: float32 [T] in [-1, 1], 16 kHz, channels averaged; writable.

    Raises InvalidRequest with a code: unsupported_media (nothing known, no sound in it, refused), invalid_audio (samples
    that are no numbers), empty_audio, audio_too_long (seconds), audio_too_large (bytes). Messages hold no paths. `stop` is
    asked between blocks and reads; DecodingStopped when it says True.
    """
    kept = bytearray()
    for block in decode_blocks(source, limits, stop=stop):
        kept += block.data.cast("B")
    return np.frombuffer(kept, np.float32)


def decode_pcm(
    source: Source, limits: MediaLimits | None = None, *, encoding: Encoding = "s16", stop: Stop | None = None
) -> bytes:
    """`decode_audio` as the bytes of an AudioRequest, never held twice: "s16" takes half the memory of "f32"."""
    kept = io.BytesIO()
    for block in decode_blocks(source, limits, encoding=encoding, stop=stop):
        kept.write(block.data.cast("B") if encoding == "f32" else to_s16(block))
    return kept.getvalue()


def decode_blocks(
    source: Source,
    limits: MediaLimits | None = None,
    *,
    encoding: Encoding = "f32",
    stop: Stop | None = None,
) -> Iterator[Samples]:
    """`decode_audio` in blocks of about a second, as they are decoded; closing the iterator closes the file.

    `encoding` is what the caller keeps, for `max_pcm_bytes`. Errors come where they are found, that is, maybe late.
    """
    limits = limits or MediaLimits()
    bytes_per_sample = 4 if encoding == "f32" else 2
    num_kept = 0
    with _opened(source, limits.max_input_bytes) as file, _understood(stop):
        with closing(_mono_blocks(_Reader(file, stop), limits.max_seconds, stop)) as pieces:
            for block in _resampled(pieces):
                num_kept += len(block)
                if num_kept * bytes_per_sample > limits.max_pcm_bytes:
                    _refuse(
                        f"the audio takes more than {limits.max_pcm_bytes} bytes when it is decoded", "audio_too_large"
                    )
                yield block
    if not num_kept:
        _refuse("there is no sound in the file", "empty_audio")


class StreamResampler:
    """PCM of one rate to another, piece by piece: however it is cut, the same samples come out, bit for bit.

    Some 16 samples of the slower rate stay behind until `finish`. Mono float32 [n] in and out.
    """

    def __init__(self, rate_in: int, rate_out: int = SAMPLE_RATE) -> None:
        """Rates in Hz; InvalidRequest when one is outside of 1000..768000."""
        for rate in (rate_in, rate_out):
            if not MIN_RATE <= rate <= MAX_RATE:
                raise InvalidRequest(f"a sample rate lies in {MIN_RATE}..{MAX_RATE} Hz, not {rate}", param="rate")
        self.rate_in, self.rate_out = rate_in, rate_out
        self._start()

    def _start(self) -> None:
        self._num_in = self._num_out = 0
        self._resampler = av.AudioResampler(format="flt", layout="mono", rate=self.rate_out)

    def push(self, samples: Samples) -> Samples:
        """More input -> what is complete of the output, maybe nothing."""
        if self.rate_in == self.rate_out or not len(samples):
            return samples
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples, np.float32)[None], format="flt", layout="mono")
        frame.sample_rate = self.rate_in
        frame.time_base = Fraction(1, self.rate_in)
        frame.pts = self._num_in
        self._num_in += len(samples)
        parts: list[Samples] = [part.to_ndarray()[0] for part in self._resampler.resample(frame)]
        out = np.concatenate(parts) if parts else np.empty(0, np.float32)
        self._num_out += len(out)
        return out

    def finish(self) -> Samples:
        """The input is over: the rest of the output, ceil(n * out / in) samples in all. It may then start anew."""
        num_missing = -(-self._num_in * self.rate_out // self.rate_in) - self._num_out
        # Silence pushes the rest out; FFmpeg's own flush gives a sample less at times, and none for very short input.
        rest = self.push(np.zeros(64 * max(self.rate_in // self.rate_out, 1), np.float32)) if num_missing else None
        self._start()
        return np.empty(0, np.float32) if rest is None else rest[:num_missing]


def from_pcm(data: bytes | bytearray | memoryview, encoding: Encoding) -> Samples:
    """Raw little-endian PCM as float32 [n]. InvalidRequest for half a sample (odd size) and samples that are no numbers."""
    size = 4 if encoding == "f32" else 2
    if len(data) % size:
        _refuse(f"{len(data)} bytes are no whole number of {encoding} samples of {size} bytes", "invalid_audio")
    if encoding == "s16":
        return np.frombuffer(data, "<i2").astype(np.float32) * np.float32(1 / 32768)
    return _checked(np.frombuffer(data, "<f4").astype(np.float32))


def to_s16(samples: Samples) -> bytes:
    """float32 [n] in [-1, 1] as little-endian 16-bit PCM; what lies outside is clipped."""
    pcm: NDArray[np.int16] = np.rint(np.clip(samples * np.float32(32768), -32768, 32767)).astype("<i2")
    return pcm.tobytes()


def encode_wav(samples: Samples, rate: int = SAMPLE_RATE, encoding: Encoding = "s16") -> bytes:
    """Mono float32 [n] as a WAV file."""
    data = to_s16(samples) if encoding == "s16" else samples.astype("<f4").tobytes()
    kind, size = (1, 2) if encoding == "s16" else (3, 4)
    header = struct.pack("<HHIIHH", kind, 1, rate, rate * size, size, 8 * size)
    return b"".join(
        (b"RIFF", struct.pack("<I", 36 + len(data)), b"WAVEfmt ", struct.pack("<I", 16), header)
        + (b"data", struct.pack("<I", len(data)), data)
    )


# --------------------------------------------------------------------------------------------------------- mechanism


def _refuse(message: str, code: str) -> NoReturn:
    raise InvalidRequest(message, param="file", code=code)


@contextmanager
def _opened(source: Source, max_bytes: int) -> Iterator[BinaryIO]:
    """The source as a seekable file of at most `max_bytes`; closed afterwards if it was opened here."""
    if isinstance(source, (str, Path)):
        try:
            opened: BinaryIO = Path(source).open("rb")
        except OSError as error:
            _refuse(f"the file cannot be opened ({error.__class__.__name__})", "unsupported_media")
        with opened:
            _check_size(opened, max_bytes)
            yield opened
    else:
        file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
        _check_size(file, max_bytes)
        yield file


def _check_size(file: BinaryIO, max_bytes: int) -> None:
    try:
        num_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
    except (OSError, ValueError) as error:
        _refuse(f"the file cannot be read ({error.__class__.__name__})", "unsupported_media")
    if num_bytes > max_bytes:
        _refuse(f"the file has {num_bytes} bytes; at most {max_bytes} are taken", "audio_too_large")
    if not num_bytes:
        _refuse("the file is empty", "empty_audio")


@contextmanager
def _understood(stop: Stop | None) -> Iterator[None]:
    """Every complaint of FFmpeg becomes ours; its own words may hold paths."""
    try:
        yield
    except InvalidRequest:
        raise
    except (av.error.FFmpegError, ValueError, MemoryError, OverflowError) as error:
        if stop is not None and stop():
            raise DecodingStopped from None
        _refuse(f"this is no sound file that can be read ({error.__class__.__name__})", "unsupported_media")


class _Reader:
    """What FFmpeg reads from. Lets `stop` through while it looks for sound in a large file that holds none."""

    def __init__(self, file: BinaryIO, stop: Stop | None) -> None:
        self._file, self._stop = file, stop

    def read(self, size: int) -> bytes:
        if self._stop is not None and self._stop():
            raise DecodingStopped
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    _refuse("the file refers to other files, which are not opened", "unsupported_media")


def _mono_blocks(reader: _Reader, max_seconds: float, stop: Stop | None) -> Generator[tuple[int, Samples]]:
    """(rate, mono float32 [n]) of the best audio stream, about a second at a time, checked and counted."""
    formats = ",".join(sorted(av.formats_available - _REFERRING))
    # A forged header may ask for the whole file to be analysed, or a cover picture for gigabytes.
    opening = {"format_whitelist": formats, "probesize": str(5 << 20), "analyzeduration": "10000000"}
    codecs = {"max_pixels": str(1 << 24)}
    with av.open(
        reader, options=codecs, container_options=opening, io_open=_open_nothing, metadata_errors="replace"
    ) as container:
        stream = container.streams.best("audio")
        if stream is None:
            _refuse("there is no audio stream in the file", "unsupported_media")
        if not stream.codec_context:
            _refuse("the audio in the file has a codec that is not known", "unsupported_media")
        stream.codec_context.thread_count = 1
        seconds, rate, num_waiting = 0.0, 0, 0
        waiting: list[Samples] = []
        for frame in _frames(container, stream, stop):
            _check_shape(frame)
            seconds += frame.samples / frame.sample_rate
            if seconds > max_seconds:
                _refuse(f"the audio is longer than {max_seconds:g} s", "audio_too_long")
            if num_waiting and (frame.sample_rate != rate or num_waiting >= rate):
                yield rate, _checked(np.concatenate(waiting))
                waiting, num_waiting = [], 0
            rate = frame.sample_rate
            waiting.append(_mono(frame))
            num_waiting += frame.samples
        if num_waiting:
            yield rate, _checked(np.concatenate(waiting))


def _frames(container: Any, stream: Any, stop: Stop | None) -> Iterator[av.AudioFrame]:
    """Decoded frames. Damaged packets are passed over and a broken end ends it, if there is any sound at all."""
    num_damaged = in_a_row = num_frames = 0
    packets = container.demux(stream)
    while True:
        if stop is not None and stop():
            raise DecodingStopped
        try:
            packet = next(packets)
        except StopIteration:
            break
        except av.error.FFmpegError:
            num_damaged += 1
            break
        except IndexError:  # a packet of a stream that was not announced, as in MPEG-TS; what follows may be ours
            num_damaged += 1
            in_a_row += 1
            if in_a_row >= _MAX_DAMAGED:
                break
            packets = container.demux(stream)
            continue
        try:
            frames = packet.decode()
        except av.error.FFmpegError:
            num_damaged += 1
            in_a_row += 1
            if in_a_row >= _MAX_DAMAGED:
                break
            continue
        in_a_row = 0
        for frame in frames:
            if frame.samples:
                num_frames += 1
                yield frame
    if num_damaged and not num_frames:
        _refuse("nothing in the file can be decoded", "unsupported_media")


def _check_shape(frame: av.AudioFrame) -> None:
    if not MIN_RATE <= frame.sample_rate <= MAX_RATE:
        _refuse(f"the audio claims a sample rate of {frame.sample_rate} Hz", "unsupported_media")
    if not 1 <= frame.layout.nb_channels <= _MAX_CHANNELS:
        _refuse(f"the audio claims {frame.layout.nb_channels} channels", "unsupported_media")


def _mono(frame: av.AudioFrame) -> Samples:
    """The mean of a frame's channels, without the one for low frequencies, as float32 of full scale 1."""
    num_channels = frame.layout.nb_channels
    if frame.format.is_planar and num_channels >= 8:
        # PyAV's view of so many planes runs past the end of their table; FFmpeg interleaves them first.
        packer = av.AudioResampler(format=frame.format.packed, layout=frame.layout, rate=frame.sample_rate)
        (frame,) = packer.resample(frame)
    data: NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        data = data.reshape(-1, num_channels).T
    if num_channels > 2:
        heard = [i for i, channel in enumerate(frame.layout.channels) if channel.name != "LFE"]
        data = data[heard] if heard else data
    scale = np.float32(1 / len(data))
    if data.dtype == np.uint8:
        data, scale = data.astype(np.int16) - 128, scale / 128
    elif data.dtype.kind == "i":
        scale /= 1 << (8 * data.dtype.itemsize - 1)
    with np.errstate(over="ignore"):  # infinity is found by `_checked`
        total: Samples = data.sum(0, dtype=np.float32) if len(data) > 1 else data[0].astype(np.float32)
        total *= scale
    return total


def _checked(samples: Samples) -> Samples:
    """Clipped to [-1, 1]; samples that are no numbers are refused."""
    if not np.isfinite(samples).all():
        _refuse("the audio holds samples that are not numbers", "invalid_audio")
    return np.clip(samples, -1.0, 1.0, out=samples)


def _resampled(pieces: Iterator[tuple[int, Samples]]) -> Iterator[Samples]:
    """At 16 kHz, from pieces whose rate may change on the way."""
    resampler: StreamResampler | None = None
    for rate, block in pieces:
        if resampler is None or resampler.rate_in != rate:
            if resampler is not None:
                yield from _some(resampler.finish())
            resampler = StreamResampler(rate)
        yield from _some(resampler.push(block))
    if resampler is not None:
        yield from _some(resampler.finish())


def _some(block: Samples) -> Iterator[Samples]:
    if len(block):
        yield np.clip(block, -1.0, 1.0, out=block)

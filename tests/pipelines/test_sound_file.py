"""Sound files while they are made: what is decoded again is what went in; speeds keep the pitch."""

from __future__ import annotations

import io
import os
import random
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from motet.engine.errors import InvalidRequest
from motet.pipelines.media import decode_audio
from motet.pipelines.sound_file import (
    CONTENT_TYPES,
    FORMATS,
    RATE,
    SoundFormat,
    TimeStretch,
    check_format,
    encode,
    format_of,
    sound_encoder,
    wav_header,
    write_file,
)

# Samples at 24 kHz that a codec may add: its delay, which a stream cannot announce, and its last frame.
SLACK = {"mp3": 3 * 576, "opus": 0, "aac": 2 * 1024, "flac": 0, "wav": 0, "pcm": 0}


def tone(seconds: float, pitch: float = 220.0) -> bytes:
    times = np.arange(round(seconds * RATE)) / RATE
    return (8000 * np.sin(2 * np.pi * pitch * times)).astype("<i2").tobytes()


def streamed(pcm: bytes, format: SoundFormat, *, speed: float = 1.0, seed: int = 1) -> list[bytes]:
    """Through the encoder in pieces of any size, odd ones too."""
    rng = random.Random(seed)
    encoder = sound_encoder(format, speed=speed)
    parts, start = [], 0
    while start < len(pcm):
        size = rng.randint(1, 9000)
        parts.append(encoder.feed(pcm[start : start + size]))
        start += size
    parts.append(encoder.finish())
    encoder.close()
    return parts


def decoded(data: bytes, format: SoundFormat) -> np.ndarray:
    """float32 at 16 kHz."""
    return decode_audio(encode(data, "wav") if format == "pcm" else data)


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_decodes_to_what_went_in(format: SoundFormat) -> None:
    pcm = tone(2.2)
    parts = streamed(pcm, format)
    heard = decoded(b"".join(parts), format)
    num_samples = len(heard) * 1.5
    assert -1 <= num_samples - len(pcm) // 2 <= SLACK[format] + 2
    assert pitch_of(heard) == pytest.approx(220, abs=2)
    assert sum(map(len, parts[: len(parts) // 2])) > 0.3 * sum(map(len, parts)), "bytes leave while sound comes in"
    assert CONTENT_TYPES[format].startswith("audio/")


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_file_has_its_length(format: SoundFormat) -> None:
    pcm = tone(1.0)
    heard = decoded(encode(pcm, format), format)
    assert -1 <= len(heard) * 1.5 - RATE <= (SLACK["aac"] if format == "aac" else 2), "ADTS has no place for a length"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pcm", [b"", b"\x00", b"\x01\x02"])
def test_next_to_nothing(format: SoundFormat, pcm: bytes) -> None:
    data = b"".join(streamed(pcm, format))
    assert format == "pcm" or data
    if format in ("flac", "mp3", "opus", "aac"):
        assert len(decode_audio(data)) < 3000


def test_wav_headers() -> None:
    pcm = tone(0.5)
    data = b"".join(streamed(pcm, "wav"))
    assert struct.unpack_from("<I", data, 4) == struct.unpack_from("<I", data, 40) == (0xFFFFFFFF,)
    assert data[44:] == pcm
    assert encode(pcm, "wav") == wav_header(len(pcm)) + pcm
    with wave.open(io.BytesIO(encode(pcm, "wav"))) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getnframes()) == (RATE, 1, RATE // 2)


def test_lossless_formats_hold_every_sample(tmp_path: Path) -> None:
    import av

    pcm = np.random.default_rng(1).integers(-3000, 3000, RATE).astype("<i2").tobytes()
    with av.open(io.BytesIO(b"".join(streamed(pcm, "flac")))) as container:
        assert b"".join(frame.to_ndarray().tobytes() for frame in container.decode(audio=0)) == pcm
    assert b"".join(streamed(pcm, "pcm")) == pcm


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.3, 2.0, 3.1, 4.0])
def test_speed_changes_the_length_and_not_the_pitch(speed: float) -> None:
    pcm = tone(3.0)
    out = b"".join(streamed(pcm, "pcm", speed=speed))
    assert len(out) // 2 == round(len(pcm) / 2 / speed)
    assert out == b"".join(streamed(pcm, "pcm", speed=speed, seed=2)), "however it is cut"
    heard = np.frombuffer(out, "<i2").astype(np.float32)
    assert pitch_of(heard, RATE) == pytest.approx(220, abs=4)
    assert np.abs(heard).max() < 9000


def test_speed_one_changes_nothing() -> None:
    stretch = TimeStretch(1)
    assert stretch.feed(b"\x01\x02\x03") == b"\x01\x02" and stretch.feed(b"\x04") == b"\x03\x04"
    assert stretch.finish() == b""


@pytest.mark.parametrize("speed", [0.0, 0.2, 4.1, -1.0, float("nan"), float("inf"), "1", None, True])
def test_speeds_that_are_refused(speed: object) -> None:
    with pytest.raises(InvalidRequest, match=r"0.25 to 4") as caught:
        sound_encoder("wav", speed=speed)  # type: ignore[arg-type]
    assert caught.value.param == "speed"


def test_formats_and_names(tmp_path: Path) -> None:
    assert [format_of(f"a.{format}") for format in FORMATS] == list(FORMATS)
    assert format_of(Path("B.WAV")) == "wav" and format_of("c.ogg") == "opus"
    with pytest.raises(InvalidRequest, match="ends in"):
        format_of("speech.txt")
    with pytest.raises(InvalidRequest) as caught:
        check_format("mp4")
    assert caught.value.param == "response_format"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    pcm = tone(0.3)
    write_file(tmp_path / "a.mp3", [pcm[:1000], pcm[1000:]])
    assert abs(len(decode_audio(tmp_path / "a.mp3")) * 1.5 - len(pcm) // 2) <= 2

    def broken() -> object:
        yield pcm
        raise LookupError

    for name in ("b.wav", "b.flac"):
        with pytest.raises(LookupError):
            write_file(tmp_path / name, broken())  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["a.mp3"]


def pitch_of(samples: np.ndarray, rate: int = 16_000) -> float:
    """Of the loudest tone in the middle, in Hz."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle)), 4 * rate))
    return float(spectrum.argmax()) / 4

"""Sound in: every usual container, PCM in pieces, and everything that is not what it says it is."""

from __future__ import annotations

import io
import json
import random
import resource
import struct
import threading
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import motet_demo
from motet.engine.errors import InvalidRequest
from motet.pipelines.media import (
    DecodingStopped,
    MediaLimits,
    StreamResampler,
    decode_audio,
    decode_blocks,
    decode_pcm,
    encode_wav,
    from_pcm,
    to_s16,
)

from .sound_files import Samples, encoded, tone, wav

FORMATS = [
    ("wav", "pcm_s16le", 16000),
    ("wav", "pcm_u8", 8000),
    ("wav", "pcm_s24le", 48000),
    ("wav", "pcm_s32le", 22050),
    ("wav", "pcm_f32le", 44100),
    ("wav", "pcm_f64le", 24000),
    ("wav", "pcm_mulaw", 8000),
    ("aiff", "pcm_s16be", 44100),
    ("flac", "flac", 44100),
    ("mp3", "libmp3lame", 44100),
    ("ogg", "flac", 48000),
    ("ogg", "libopus", 48000),
    ("webm", "libopus", 48000),
    ("matroska", "flac", 32000),
    ("ipod", "aac", 44100),
    ("adts", "aac", 48000),
    ("mov", "alac", 48000),
]


def loudest_hz(samples: Samples, rate: int = 16000) -> float:
    return float(np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples))


def refusal(source: Any, limits: MediaLimits | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode_audio(source, limits)
    assert "/" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(("container", "codec", "rate"), FORMATS)
def test_usual_files(container: str, codec: str, rate: int) -> None:
    samples = decode_audio(encoded(tone(2, rate)[None], rate, container, codec))
    assert samples.dtype == np.float32 and samples.flags.writeable
    assert abs(len(samples) - 32000) < 0.1 * 16000  # lossy codecs pad
    assert abs(loudest_hz(samples[4000:28000]) - 440) < 2
    assert abs(float(np.sqrt(np.mean(samples[4000:28000] ** 2))) - 0.4 / 2**0.5) < 0.02


def test_sources_of_every_kind_give_the_same(tmp_path: Path) -> None:
    data = encoded(tone(1, 24000)[None], 24000, "flac", "flac")
    path = tmp_path / "sound.flac"
    path.write_bytes(data)
    expected = decode_audio(data)
    for source in (path, str(path), io.BytesIO(data), bytearray(data), memoryview(data)):
        assert np.array_equal(decode_audio(source), expected)
    with path.open("rb") as file:
        file.seek(7)
        assert np.array_equal(decode_audio(file), expected)
        assert not file.closed
    assert np.array_equal(np.concatenate(list(decode_blocks(path))), expected)
    assert np.array_equal(np.frombuffer(decode_pcm(path, encoding="f32"), np.float32), expected)
    assert decode_pcm(path) == to_s16(expected)


def test_the_demo_clips_are_decoded_sample_by_sample() -> None:
    assert sum(path.stat().st_size for path, _ in motet_demo.clips()) < 1_000_000
    assert "CC-BY-SA-3.0" in (motet_demo.clips()[0][0].parent / "LICENSE.md").read_text()
    for path, text in motet_demo.clips():
        samples = decode_audio(path)
        assert 2 * 16000 < len(samples) < 12 * 16000 and len(text.split()) > 4
        assert np.array_equal(samples * 32768, np.rint(samples * 32768))


def test_wav_goes_there_and_back() -> None:
    samples = tone(0.5, 16000)
    assert np.array_equal(decode_audio(encode_wav(samples, encoding="f32")), samples)
    assert np.abs(decode_audio(encode_wav(samples)) - samples).max() < 1 / 32768


def test_the_sound_of_a_video() -> None:
    samples = decode_audio(encoded(tone(1, 44100)[None], 44100, "mp4", "aac", picture=True))
    assert abs(loudest_hz(samples[2000:14000]) - 440) < 3


@pytest.mark.parametrize(("layout", "count"), [("stereo", 2), ("5.1", 6), ("6.1", 7)])
def test_channels_are_averaged_and_the_low_one_left_out(layout: str, count: int) -> None:
    one = tone(1, 16000, 300.0)
    channels = np.zeros((count, 16000), np.float32)
    channels[0] = one
    if count > 2:
        channels[3] = tone(1, 16000, 50.0)  # LFE
    samples = decode_audio(encoded(channels, 16000, "wav", "pcm_s16le", layout=layout))
    heard = count - (count > 2)
    assert np.abs(samples - one / heard).max() < 2 / 32768


def test_more_channels_than_have_names() -> None:
    data = np.zeros((1000, 11), np.int16)
    data[:, 4] = 11000
    samples = decode_audio(wav(data.tobytes(), channels=11))
    assert np.allclose(samples, 1000 / 32768, atol=1e-6) and len(samples) == 1000


def test_many_planes_of_samples() -> None:
    """Eight channels, each for itself: PyAV's own view of such a frame reads past its end."""
    channels = np.zeros((1600, 8), np.float32)
    channels[:, 0] = 0.5
    file = io.BytesIO()
    with av.open(file, "w", format="wv") as out:
        sound = out.add_stream("wavpack", rate=16000, layout="7.1")
        frame = av.AudioFrame.from_ndarray(channels.reshape(1, -1), format="flt", layout="7.1")
        frame.sample_rate, frame.pts = 16000, 0
        out.mux(sound.encode(frame))
        out.mux(sound.encode(None))
    assert np.allclose(decode_audio(file.getvalue()), np.full(1600, 0.5 / 7), atol=1e-4)


def test_rates_that_change_on_the_way() -> None:
    joined = b"".join(encoded(tone(1, rate)[None], rate, "mp3", "libmp3lame") for rate in (16000, 44100, 16000))
    samples = decode_audio(joined)
    assert abs(len(samples) - 3 * 16000) < 8000
    assert abs(loudest_hz(samples[20000:28000]) - 440) < 3


# ------------------------------------------------------------------------------------------------- streams of PCM


@given(
    st.sampled_from([8000, 11025, 22050, 24000, 44100, 48000]),
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_resampling_in_pieces_equals_resampling_the_whole(rate: int, sizes: list[int], seed: int) -> None:
    whole = np.random.default_rng(seed).uniform(-0.9, 0.9, sum(sizes)).astype(np.float32)
    at_once = StreamResampler(rate)
    expected = np.concatenate([at_once.push(whole), at_once.finish()])
    resampler = StreamResampler(rate)
    for _ in range(2):  # and again with the same one
        pieces = [resampler.push(piece) for piece in np.split(whole, np.cumsum(sizes)[:-1])]
        assert np.array_equal(np.concatenate([*pieces, resampler.finish()]), expected)
    assert len(expected) == -(-len(whole) * 16000 // rate)


def test_resampling_keeps_the_tone_and_its_place() -> None:
    for rate in (8000, 24000, 48000):
        resampler = StreamResampler(rate)
        got = np.concatenate([resampler.push(tone(1, rate)), resampler.finish()])
        assert np.abs(got - tone(1, 16000))[200:-200].max() < 2e-3
    same = StreamResampler(16000)
    assert same.push(tone(1, 16000)) is not None and len(same.finish()) == 0
    assert len(StreamResampler(24000).finish()) == 0


@pytest.mark.parametrize("rate", [0, -1, 999, 10**9])
def test_impossible_rates_of_streams(rate: int) -> None:
    with pytest.raises(InvalidRequest, match="sample rate"):
        StreamResampler(rate)


def test_raw_pcm() -> None:
    assert np.array_equal(from_pcm(b"\x00\x80\xff\x7f", "s16"), np.float32([-1, 32767 / 32768]))
    floats = np.float32([-2.0, 0.25, 1.5])
    assert np.array_equal(from_pcm(floats.tobytes(), "f32"), np.float32([-1, 0.25, 1]))
    assert to_s16(floats) == np.int16([-32768, 8192, 32767]).tobytes()
    for data, encoding in ((b"\x00", "s16"), (b"\x00" * 6, "f32"), (np.float32([np.nan]).tobytes(), "f32")):
        with pytest.raises(InvalidRequest) as caught:
            from_pcm(data, encoding)  # type: ignore[arg-type]
        assert caught.value.code == "invalid_audio"


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 5000,
        b"x",
        b"hello, this is not a sound\n" * 100,
        json.dumps({"audio": [1, 2, 3]}).encode(),
        b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(3000),
        b"PK\x03\x04" + random.Random(1).randbytes(3000),
        b"1\n00:00:01,000 --> 00:00:02,000\nA subtitle.\n",
        zlib.compress(b"0" * 100_000),
    ],
)
def test_what_is_no_sound(data: bytes) -> None:
    assert refusal(data).code == "unsupported_media"


def test_noise_is_never_more_than_refused() -> None:
    draw = random.Random(2)
    for size in (10, 1000, 70_000):
        assert refusal(draw.randbytes(size)).code in ("unsupported_media", "empty_audio")


def test_a_video_without_sound() -> None:
    silent = encoded(np.zeros((1, 0), np.float32), 16000, "matroska", "flac", picture=True)
    assert refusal(silent).code in ("empty_audio", "unsupported_media")


def test_empty(tmp_path: Path) -> None:
    assert refusal(b"").code == "empty_audio"
    assert refusal(wav(b"")).code == "empty_audio"
    (tmp_path / "empty.wav").touch()
    assert refusal(tmp_path / "empty.wav").code == "empty_audio"


def test_missing_files_and_folders_are_named_by_their_error_only(tmp_path: Path) -> None:
    assert "FileNotFoundError" in refusal(tmp_path / "none.wav").message
    assert "IsADirectoryError" in refusal(tmp_path).message


@pytest.mark.parametrize(("container", "codec", "rate"), FORMATS)
def test_cut_off_and_damaged_files_give_some_sound_or_a_refusal(container: str, codec: str, rate: int) -> None:
    whole = encoded(tone(1, rate)[None], rate, container, codec)
    draw = random.Random(rate)
    for _ in range(8):
        damaged = bytearray(whole[: draw.randrange(1, len(whole))])
        if draw.random() < 0.7:
            for _ in range(draw.choice([1, 5, 50])):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            samples = decode_audio(bytes(damaged), MediaLimits(max_seconds=60))
        except InvalidRequest as error:
            assert error.code in (
                "unsupported_media",
                "empty_audio",
                "audio_too_long",
                "audio_too_large",
                "invalid_audio",
            )
        else:
            assert 0 < len(samples) <= 60 * 16000 and np.isfinite(samples).all()


def test_half_a_recording_is_half_a_recording() -> None:
    whole = encoded(tone(10, 44100)[None], 44100, "mp3", "libmp3lame")
    assert 4.5 * 16000 < len(decode_audio(whole[: len(whole) // 2])) < 5.5 * 16000


def test_impossible_wav_headers() -> None:
    data = to_s16(tone(1, 16000))
    assert refusal(wav(data, channels=0)).code == "unsupported_media"
    assert refusal(wav(data, rate=0)).code == "unsupported_media"
    assert refusal(wav(data, rate=1)).code == "unsupported_media"
    assert refusal(wav(data, rate=(1 << 32) - 1)).code == "unsupported_media"
    assert refusal(wav(data, bits=0)).code == "unsupported_media"
    assert refusal(wav(data, channels=65535, bits=8)).code in ("unsupported_media", "empty_audio")


def test_a_wrong_declared_rate_is_believed_within_reason_and_counted() -> None:
    data = to_s16(tone(1, 16000))
    assert len(decode_audio(wav(data, rate=8000))) == 32000
    assert refusal(wav(data, rate=1000), MediaLimits(max_seconds=10)).code == "audio_too_long"


def test_a_wrong_declared_length_is_not_believed() -> None:
    data = to_s16(tone(1, 16000))
    tracemalloc.start()
    try:
        assert len(decode_audio(wav(data, claimed=(1 << 32) - 100))) == 16000
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    assert len(decode_audio(wav(data, claimed=200))) == 100


def test_half_a_sample_at_the_end() -> None:
    data = to_s16(tone(1, 16000))
    assert len(decode_audio(wav(data + b"\x01"))) == 16000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers(bad: float) -> None:
    samples = tone(1, 16000)
    samples[9000] = bad
    assert refusal(encode_wav(samples, encoding="f32")).code == "invalid_audio"


def test_samples_beyond_full_scale_are_clipped() -> None:
    samples = decode_audio(encode_wav(np.float32([1e30, -7, 0.5] * 100), 44100, encoding="f32"))
    assert np.abs(samples).max() <= 1


@pytest.fixture(scope="module")
def hours_of_silence() -> bytes:
    """Forty-five minutes in half a megabyte."""
    return encoded(np.zeros((1, 45 * 60 * 8000), np.float32), 8000, "flac", "flac")


def test_a_bomb_is_stopped_when_it_has_said_enough(hours_of_silence: bytes) -> None:
    assert len(hours_of_silence) < 600_000
    blocks = 0
    with pytest.raises(InvalidRequest) as caught:
        for _ in decode_blocks(hours_of_silence, MediaLimits(max_seconds=30)):
            blocks += 1
    assert caught.value.code == "audio_too_long" and 25 < blocks < 32
    limits = MediaLimits(max_pcm_bytes=1_000_000)
    assert refusal(hours_of_silence, limits).code == "audio_too_large"
    with pytest.raises(InvalidRequest):
        decode_pcm(hours_of_silence, limits)


def test_a_cover_picture_is_not_unpacked() -> None:
    """A FLAC file whose picture of half a megabyte would take 108 MB."""
    size = 6000
    packer = zlib.compressobj(1)
    row = bytes(3 * size + 1)
    pixels = b"".join(packer.compress(row) for _ in range(size)) + packer.flush()
    parts = ((b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)), (b"IDAT", pixels), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    picture = struct.pack(">II9sIIIIII", 3, 9, b"image/png", 0, 0, 0, 24, 0, len(png)) + png
    plain = encoded(tone(1, 16000)[None], 16000, "flac", "flac")
    head, rest = bytearray(plain[:42]), plain[42:]
    last, head[4] = head[4] & 0x80, head[4] & 0x7F
    file = bytes(head) + struct.pack(">I", (6 | last) << 24 | len(picture)) + picture + rest
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert np.array_equal(decode_audio(file), decode_audio(plain))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_size_is_looked_at_first(tmp_path: Path) -> None:
    big = tmp_path / "big.wav"
    with big.open("wb") as file:
        file.truncate(10 << 30)  # ten gigabytes that take no room
    started = time.process_time()
    assert refusal(big).code == "audio_too_large"
    assert refusal(b"x" * 101, MediaLimits(max_input_bytes=100)).code == "audio_too_large"
    assert time.process_time() - started < 1


def test_files_that_name_other_files_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(encode_wav(tone(1, 16000)))
    playlists = [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{secret}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
        "ffconcat version 1.0\nfile secret.wav\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 9 RTP/AVP 0\n",
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet>'
        f"<Representation><BaseURL>{secret}</BaseURL></Representation></AdaptationSet></Period></MPD>",
    ]
    for playlist in playlists:
        path = tmp_path / "list.m3u8"
        path.write_text(playlist)
        assert refusal(playlist.encode()).code == "unsupported_media", playlist
        assert refusal(path).code == "unsupported_media", playlist


def test_decoding_can_be_stopped(hours_of_silence: bytes) -> None:
    asked = 0

    def after_ten() -> bool:
        nonlocal asked
        asked += 1
        return asked > 10

    with pytest.raises(DecodingStopped):
        decode_audio(hours_of_silence, stop=after_ten)
    with pytest.raises(DecodingStopped):
        decode_audio(b"\x00" * 10_000_000, stop=lambda: True)
    blocks = decode_blocks(hours_of_silence)
    next(blocks)
    blocks.close()


def test_threads_do_not_disturb_each_other() -> None:
    files = [encoded(tone(1, 44100, 200.0 + 50 * i)[None], 44100, "mp3", "libmp3lame") for i in range(4)]
    expected = [decode_audio(file) for file in files]
    got: dict[int, Samples] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: decode_audio(files[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(got[i], expected[i]) for i in range(4))

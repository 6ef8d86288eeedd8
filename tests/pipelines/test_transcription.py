"""`Transcription` from a user's side: whole, streamed, async, many, left early, refused. A scripted client is the engine."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
import time
import wave
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jiwer
import numpy as np
import pytest

from motet import Transcription
from motet.engine.config import HostConfig
from motet.engine.errors import ErrorInfo, InternalError, InvalidRequest, Unavailable
from motet.engine.types import Segment, TranscribeOptions
from motet.pipelines.hub import Hub
from motet.pipelines.types import PartialText, SpeechMark

from .scripted_recogniser import MODEL, RATE, ScriptedRecogniser

TEXT = "second 0. second 1. second 2."


@pytest.fixture
def client() -> ScriptedRecogniser:
    return ScriptedRecogniser()


@pytest.fixture
def transcription(client: ScriptedRecogniser) -> Iterator[Transcription]:
    with Hub(HostConfig(), client=client) as hub:
        yield Transcription(MODEL, hub=hub)


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return (0.25 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def wait_until(true: object, *, timeout_s: float = 5.0) -> None:
    assert callable(true)
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_samples(transcription: Transcription, client: ScriptedRecogniser) -> None:
    samples = tone(2.5)
    result = transcription(samples, word_timestamps=True, language="en", temperature=0, priority=3)
    assert result.text == str(result) == TEXT
    assert [segment.end for segment in result.segments] == [1.0, 2.0, 2.5]
    assert [word.word for word in result.words] == [" second 0.", " second 1.", " second 2."]
    assert (result.language, result.language_probability, result.duration) == ("en", 0.75, 2.5)
    assert (result.timing.queue_s, result.timing.speed) == (0.25, 5.0)
    (request,) = client.requests
    assert request.options == TranscribeOptions(word_timestamps=True, language="en", temperatures=(0.0,))
    assert (request.priority, request.encoding, request.open) == (3, "f32", False)
    assert np.array_equal(client.samples(), samples)


def test_files_their_bytes_and_samples_are_the_same(
    transcription: Transcription, client: ScriptedRecogniser, tmp_path: Path
) -> None:
    samples = tone(1.0)
    (tmp_path / "a.wav").write_bytes(wav(samples))
    for audio in (tmp_path / "a.wav", str(tmp_path / "a.wav"), wav(samples), (samples * 32767).astype(np.int16)):
        assert transcription(audio).text == "second 0."
    for number in range(4):
        assert np.allclose(client.samples(number), samples, atol=2 / 32767)


def test_other_rates_are_resampled(transcription: Transcription, client: ScriptedRecogniser) -> None:
    assert transcription(tone(1.0, 44_100), sample_rate=44_100).duration == pytest.approx(1.0, abs=0.01)
    heard = client.samples()
    assert np.abs(np.fft.rfft(heard[: RATE // 2])).argmax() == 220  # still 440 Hz
    stream = transcription.stream((tone(1.0, 44_100)[i : i + 1001] for i in range(0, 44_100, 1001)), sample_rate=44_100)
    list(stream)
    assert np.array_equal(client.samples(1), heard)


def test_subtitles_and_json(transcription: Transcription) -> None:
    result = transcription(tone(2.0), word_timestamps=True)
    assert result.to_srt().startswith("1\n00:00:00,000 --> 00:00:01,000\nsecond 0.\n")
    assert result.to_vtt().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nsecond 0.\n")
    found = json.loads(result.to_json())
    assert found["task"] == "transcribe" and found["language"] == "en" and found["duration"] == 2.0
    assert found["text"] == "second 0. second 1."
    assert found["segments"][1]["start"] == 1.0 and "speaker" not in found["segments"][1]
    assert found["words"][0] == {"word": " second 0.", "start": 0.0, "end": 1.0, "probability": 0.9}
    assert "words" not in json.loads(transcription(tone(1.0)).to_json())


def test_many_run_together_and_come_back_in_order() -> None:
    client = ScriptedRecogniser()
    client.together = 5
    with Hub(HostConfig(), client=client) as hub:
        transcription = Transcription(MODEL, hub=hub)
        results = transcription([tone(number % 3 + 0.5) for number in range(20)])
        assert [result.duration for result in results] == [number % 3 + 0.5 for number in range(20)]
        assert client.most_running > 4
        assert transcription([]) == []


def test_memory_for_many_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from motet.pipelines import transcription as module

    client = ScriptedRecogniser()
    client.together = 2
    monkeypatch.setattr(module, "BYTES_TOGETHER", 4 * RATE)
    with Hub(HostConfig(), client=client) as hub:
        results = Transcription(MODEL, hub=hub)([tone(0.5), tone(0.4), tone(3.0), tone(0.3), tone(0.5)])
    assert [result.duration for result in results] == [0.5, 0.4, 3.0, 0.3, 0.5]
    assert client.most_running == 2


def test_one_bad_file_ends_the_call_and_aborts_the_rest(tmp_path: Path) -> None:
    client = ScriptedRecogniser(delay_s=0.05)
    with Hub(HostConfig(), client=client) as hub:
        with pytest.raises(InvalidRequest):
            Transcription(MODEL, hub=hub)([tone(60), b"this is not audio at all"])
        wait_until(lambda: client.num_running == 0)


def test_a_file_can_be_followed(transcription: Transcription, client: ScriptedRecogniser) -> None:
    client.delay_s = 0.05
    stream = transcription.stream(tone(2.5))
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.result
    assert [event.text for event in stream if isinstance(event, Segment)] == [" second 0.", " second 1.", " second 2."]
    assert stream.result.text == TEXT
    assert list(stream) == []


@pytest.mark.parametrize("size", [1001, 5, 2 * 48_001])
def test_live_audio_in_pieces_of_any_size(size: int) -> None:
    client = ScriptedRecogniser()
    samples = tone(0.05 if size == 5 else 2.5)
    data = (samples * 32767).astype("<i2").tobytes()
    with Hub(HostConfig(), client=client) as hub:
        stream = Transcription(MODEL, hub=hub).stream(data[i : i + size] for i in range(0, len(data), size))
        events = list(stream)
    assert np.array_equal(client.samples(), np.frombuffer(data, "<i2").astype(np.float32) / 32768)
    assert client.requests[0].open
    assert client.longest_append <= 4 * RATE
    assert isinstance(events[0], SpeechMark) and events[0].what == "started" and events[0].at_s == 0
    committed = "".join(event.committed for event in events if isinstance(event, PartialText))
    assert committed == "".join(f" part{number}" for number in range(len(stream.result.segments)))
    if size != 5:
        assert stream.result.text == TEXT
        assert [event.start for event in events if isinstance(event, Segment)] == [0, 1, 2]


def test_live_events_come_while_audio_is_still_coming() -> None:
    client = ScriptedRecogniser()
    heard = threading.Event()

    def microphone() -> Iterator[np.ndarray]:
        yield tone(1.0)
        assert heard.wait(5)
        yield tone(1.0)

    with Hub(HostConfig(), client=client) as hub:
        stream = Transcription(MODEL, hub=hub).stream(microphone())
        assert [type(next(stream)) for _ in range(3)] == [SpeechMark, PartialText, Segment]
        heard.set()
        assert len(list(stream)) == 3


def test_what_a_microphone_raises_reaches_the_reader(client: ScriptedRecogniser) -> None:
    def microphone() -> Iterator[np.ndarray]:
        yield tone(1.0)
        raise OSError("unplugged")

    with Hub(HostConfig(), client=client) as hub:
        with pytest.raises(OSError, match="unplugged"):
            list(Transcription(MODEL, hub=hub).stream(microphone()))
        wait_until(lambda: client.num_running == 0)


def test_leaving_a_stream_ends_the_request() -> None:
    client = ScriptedRecogniser(delay_s=0.02)
    with Hub(HostConfig(), client=client) as hub:
        with Transcription(MODEL, hub=hub).stream(tone(60)) as stream:
            next(stream)
        wait_until(lambda: client.num_running == 0)


def test_async_twins() -> None:
    async def microphone() -> AsyncIterator[np.ndarray]:
        for _ in range(4):
            await asyncio.sleep(0)
            yield tone(0.5)

    async def main() -> None:
        hub = Hub(HostConfig(), client=ScriptedRecogniser())
        async with Transcription(MODEL, hub=hub) as transcription:
            assert (await transcription.call_async(tone(2.5))).text == TEXT
            assert len(await transcription.call_async([tone(1), tone(2)])) == 2
            for audio in (microphone(), iter([tone(2.0)]), tone(2.0)):
                stream = transcription.stream_async(audio)
                events = [event async for event in stream]
                assert stream.result.text == "second 0. second 1."
                assert len([event for event in events if isinstance(event, Segment)]) == 2
        hub.close()

    asyncio.run(main())


def test_what_an_async_microphone_raises_reaches_the_reader() -> None:
    async def microphone() -> AsyncIterator[np.ndarray]:
        yield tone(1.0)
        raise OSError("unplugged")

    async def main() -> None:
        client = ScriptedRecogniser()
        with Hub(HostConfig(), client=client) as hub:
            with pytest.raises(OSError, match="unplugged"):
                async for _ in Transcription(MODEL, hub=hub).stream_async(microphone()):
                    pass
        assert client.num_running == 0

    asyncio.run(main())


def test_leaving_async_work_ends_the_request() -> None:
    client = ScriptedRecogniser(delay_s=0.05)

    async def main(transcription: Transcription) -> None:
        async with transcription.stream_async(tone(60)) as stream:
            async for _ in stream:
                break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transcription.call_async(tone(60))

    with Hub(HostConfig(), client=client) as hub:
        asyncio.run(main(Transcription(MODEL, hub=hub)))
        wait_until(lambda: client.num_running == 0)


@pytest.mark.parametrize(
    ("audio", "options", "words"),
    [
        (np.zeros((2, 16)), {}, "one channel"),
        (np.zeros(16, np.int64), {}, "int64"),
        (np.full(16, np.nan), {}, "finite"),
        (5, {}, "got int"),
        ("/nonexistent.wav", {}, "nonexistent"),
        (b"this is not audio at all", {}, "no sound file"),
        (np.zeros(16), {"beam": 5}, "beam_size"),
        (np.zeros(16), {"vad_threshold": "high"}, "vad_threshold"),
        (np.zeros(16), {"task": "sing"}, "task"),
        (np.zeros(16), {"temperature": 0, "temperatures": (0, 1)}, "not both"),
        (np.zeros(16), {"sample_rate": 3}, "sample_rate"),
    ],
)
def test_what_cannot_be_asked(
    transcription: Transcription, audio: object, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        transcription(audio, **options)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match=words):
        transcription.stream(audio, **options)  # type: ignore[arg-type]


def test_all_options_at_once_and_known_speakers(transcription: Transcription, client: ScriptedRecogniser) -> None:
    voice = tone(2.0)
    transcription(
        tone(1),
        options=TranscribeOptions(beam_size=5, seed=7),
        seed=8,
        suppress_tokens=[1, 2],
        known_speakers={"Ann": voice},
    )
    assert client.requests[0].options == TranscribeOptions(
        beam_size=5, seed=8, suppress_tokens=(1, 2), known_speakers=(("Ann", voice.tobytes()),)
    )


def test_failures_are_raised() -> None:
    client = ScriptedRecogniser(fail=ErrorInfo(kind="InternalError", message="broken", code="internal_error"))
    with Hub(HostConfig(), client=client) as hub:
        transcription = Transcription(MODEL, hub=hub)
        with pytest.raises(InternalError, match="broken"):
            transcription(tone(1))
        with pytest.raises(InternalError, match="broken"):
            list(transcription.stream(iter([tone(1)])))


def test_another_kind_of_model_is_refused() -> None:
    with Hub(HostConfig(), client=ScriptedRecogniser(kind="llm")) as hub:
        with pytest.raises(InvalidRequest, match="'llm'"):
            Transcription(MODEL, hub=hub)


def test_closed_is_closed(transcription: Transcription) -> None:
    transcription.hub.close()
    with pytest.raises(Unavailable, match="closed"):
        transcription(tone(1))


def test_the_packaged_recogniser_hears_people() -> None:
    from motet_demo import clips

    spoken = [clip for clip in clips() if clip[0].stem in ("ss-noservice", "vm-mismatch")]
    with Transcription("whisper-tiny.en", threads=1) as transcription:
        results = transcription([path for path, _ in spoken])
        stream = transcription.stream(spoken[0][0].read_bytes(), word_timestamps=True)
        segments = list(stream)
    assert jiwer.wer([text.lower() for _, text in spoken], [result.text.lower() for result in results]) < 0.3
    assert stream.result.text == results[0].text
    assert [word.word for word in stream.result.words][:3] == [" The", " number", " you"]
    assert segments == list(stream.result.segments)
    assert all(0 <= segment.start < segment.end <= stream.result.duration for segment in stream.result.segments)


def test_importing_it_brings_no_torch_and_no_codecs() -> None:
    code = "import sys, motet; motet.Transcription; assert not {'torch', 'av'} & set(sys.modules), sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

"""Voices of the NeuTTS kind: a language model of one codebook, a reference in front of every prompt, a codec of one level."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from motet.engine.config import EngineConfig, HostConfig
from motet.engine.errors import ModelLoadError
from motet.engine.load import build_engine
from motet.engine.speech_engine import SpeechEngine
from motet.engine.types import TERMINAL, AnyEvent, Audio, Done, SpeechRequest
from motet.models.speech_format import load_format

from .. import tiny

CONFIG = HostConfig(engine=EngineConfig(dtype="float32", device="cpu", block_size=4, num_blocks=513, max_num_seqs=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_voice(tmp_path_factory.mktemp("neutts"), family="neutts", strides=(4,))


def load(folder: Path) -> SpeechEngine:
    engine = build_engine(str(folder), CONFIG, lambda phase: None)
    assert isinstance(engine, SpeechEngine)
    return engine


def speak(engine: SpeechEngine, requests: list[SpeechRequest]) -> list[bytes]:
    """PCM of each request; every one ends well, and once."""
    for request in requests:
        engine.submit(request)
    events: list[AnyEvent] = []
    for _ in range(20_000):
        if not engine.num_requests():
            break
        events += engine.step()
    told = []
    for request in requests:
        mine = [event for event in events if event.request_id == request.request_id]
        assert [isinstance(event, TERMINAL) for event in mine] == [False] * (len(mine) - 1) + [True]
        assert isinstance(mine[-1], Done), mine[-1]
        told.append(b"".join(event.pcm for event in mine if isinstance(event, Audio)))
        assert mine[-1].audio_s == pytest.approx(len(told[-1]) / 48_000)
    return told


def test_it_speaks_in_each_of_its_voices_alone_and_together(folder: Path) -> None:
    format = load_format(folder)
    assert format.num_places == 1 and format.frames([format.first + 5, format.first]).tolist() == [[5], [0]]
    cases = [("hello.", "tara"), ("no", "leo"), ("hello.", "leo")]

    def requests() -> list[SpeechRequest]:
        made = []
        for seed, (text, voice) in enumerate(cases):
            params = tiny.request([1], temperature=0.9, seed=seed).params
            prompt = format.prompt(text, voice)
            made.append(SpeechRequest(request_id=f"r{seed}", model="v", utterances=[prompt], params=params))
        return made

    engine = load(folder)
    try:
        together = speak(engine, requests())
        alone = [speak(engine, [request])[0] for request in requests()]
        assert all(len(pcm) >= 2 * format.frame_samples for pcm in together)
        assert len(set(together)) == 3
        for one, other in zip(together, alone, strict=True):
            assert len(one) == len(other)
            difference = np.frombuffer(one, "<i2").astype(int) - np.frombuffer(other, "<i2")
            assert np.abs(difference).max() <= 4  # of 32767: numbers of a codec's batch, not its codes
        stats = engine.stats()
        assert stats["prefix_hits"] > 0  # the reference is in the cache
    finally:
        engine.close()


@pytest.mark.parametrize("codec", ["gone", "foreign", "another"])
def test_without_its_codec_it_is_refused_by_name(folder: Path, tmp_path: Path, codec: str) -> None:
    voice = tmp_path / "voice"
    shutil.copytree(folder, voice)
    if codec == "gone":
        shutil.rmtree(voice / "codec")
        words = "codec: .*neutts.*'codec'"
    elif codec == "foreign":
        (voice / "codec" / "config.json").write_text(json.dumps({"model_type": "neucodec", "sample_rate": 24_000}))
        words = "codec: .*SNAC"
    else:
        speech = json.loads((voice / "speech.json").read_text())
        (voice / "speech.json").write_text(json.dumps(speech | {"codec": "neuphonic-neucodec"}))
        words = "codec: .*neutts.*'neuphonic-neucodec'"
    with pytest.raises(ModelLoadError, match=words):
        load(voice)

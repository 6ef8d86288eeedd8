"""A voice from its folder to the host: format, language model and codec together."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from motet.engine.client import InlineClient
from motet.engine.codec_engine import CodecEngine
from motet.engine.config import EngineConfig, HostConfig
from motet.engine.errors import ModelLoadError
from motet.engine.speech_engine import SpeechEngine
from motet.engine.speech_load import load_speech
from motet.engine.types import AnyEvent, Audio, Done, Failed, SamplingParams, SpeechRequest
from motet.kernels.dispatch import cpu_ops

from .. import tiny

TEXTS = ["hello there.", "what?", "a bird in the hand.", "yes, no."]


def config(**engine: object) -> HostConfig:
    settings: dict[str, object] = {"dtype": "float32", "device": "cpu", "deterministic": cpu_ops() is not None}
    return HostConfig(threads=1, engine=EngineConfig(**(settings | {"max_num_seqs": 8} | engine)))  # type: ignore[arg-type]


def request(engine: SpeechEngine, name: str, *texts: str, seed: int = 0) -> SpeechRequest:
    params = SamplingParams(temperature=0.8, seed=seed)
    utterances = [engine.format.prompt(text) for text in texts]
    return SpeechRequest(request_id=name, model="", utterances=utterances, params=params)


def speak(engine: SpeechEngine, requests: list[SpeechRequest]) -> list[np.ndarray]:
    """Samples of each request."""
    for one in requests:
        engine.submit(one)
    events: list[AnyEvent] = []
    while engine.has_work():
        events += engine.step()
    assert sum(isinstance(event, Done) for event in events) == len(requests)
    assert isinstance(engine.codec, CodecEngine) and engine.codec.num_open == 0 and tiny.all_free(engine.lm)
    return [
        np.frombuffer(
            b"".join(e.pcm for e in events if isinstance(e, Audio) and e.request_id == one.request_id), "<i2"
        ).astype(int)
        for one in requests
    ]


@pytest.mark.parametrize("path", [tiny.voice, tiny.orpheus, tiny.neutts], ids=["motet-voice", "orpheus", "neutts"])
def test_a_voice_loads_and_speaks_together_as_alone(path: object) -> None:
    engine = load_speech(str(path()), config())  # type: ignore[operator]
    info = engine.info
    assert info.kind == "tts" and info.extra["sample_rate"] == 24000 and info.source == str(path())  # type: ignore[operator]
    assert info.extra["default_voice"] in info.extra["voices"] and info.extra["family"] == engine.format.family
    stats = engine.stats()
    assert stats["speech_seconds"] == stats["generation_tokens"] == 0  # the rehearsal is forgotten
    assert not engine.num_requests()
    alone = [speak(engine, [request(engine, f"a{at}", text, seed=at)])[0] for at, text in enumerate(TEXTS)]
    together = speak(engine, [request(engine, f"t{at}", text, seed=at) for at, text in enumerate(TEXTS)])
    for one, other in zip(alone, together, strict=True):
        assert len(one) == len(other) and len(one) > 0 and one.any()
        assert np.abs(one - other).max() <= 4  # 1e-4 of full scale: rounding of sums within the codec


def test_an_abort_closes_the_codecs_stream() -> None:
    engine = load_speech(str(tiny.voice()), config())
    assert isinstance(engine.codec, CodecEngine)
    engine.submit(request(engine, "x", *TEXTS))
    while not engine.codec.num_open:
        engine.step()
    engine.abort("x", "client")
    assert engine.codec.num_open == 0 and engine.lm.num_requests() == 0


def test_the_host_serves_a_voice() -> None:
    async def scenario() -> None:
        client = InlineClient(config())
        try:
            model = str(tiny.voice())
            info = await client.load(model)
            prompt = [1, 6, 7, 2, 3]
            asked = SpeechRequest(request_id="x", model=model, utterances=[prompt], open=True)
            events = client.submit(asked)
            heard = [await anext(events)]
            await client.append("x", prompt, last=True)
            heard += [event async for event in events]
            assert isinstance(heard[-1], Done) and heard[-1].audio_s > 0
            assert {event.utterance for event in heard if isinstance(event, Audio)} == {0, 1}
            wrong = [e async for e in client.submit(SpeechRequest(request_id="y", model=model, utterances=[[9999]]))]
            assert len(wrong) == 1 and isinstance(wrong[0], Failed) and wrong[0].error.param == "input"
            stats = (await client.stats())["models"][model]
            assert stats["speech_seconds"] == pytest.approx(heard[-1].audio_s) and info.kind == "tts"
        finally:
            await client.close()

    asyncio.run(scenario())


def test_pieces_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    shutil.copytree(tiny.voice(), folder)
    speech = json.loads((folder / "speech.json").read_text())
    speech["audio"]["first"] += 8  # beyond the language model's vocabulary
    (folder / "speech.json").write_text(json.dumps(speech))
    with pytest.raises(ModelLoadError, match="language model"):
        load_speech(str(folder), config())
    shutil.copy(tiny.voice() / "speech.json", folder / "speech.json")
    shutil.rmtree(folder / "codec")
    with pytest.raises(Exception, match="codec"):
        load_speech(str(folder), config())

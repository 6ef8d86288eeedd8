"""The packaged voice is understood, by the packaged recogniser; the card has the figure over all fifty sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motet import Speech, Transcription
from motet.deploy.speech_demo import error_rate
from motet.models.registry import find
from motet.pipelines.media import decode_audio

# Of demo/recipes/voice_heldout.tsv, without figures that recognisers write in several ways.
SENTENCES = (
    "The recipe needs flour.",
    "Nobody expected the weather to change so quickly.",
    "The museum is closed on Mondays.",
    "Dr. Brown teaches history and music.",
    "The children built a castle out of sand.",
    "Remember to water the plants while I am away.",
)


def test_it_is_understood(tmp_path: Path) -> None:
    with Speech("motet-voice", threads=1) as speech:
        assert speech.info.extra["voices"] == ["rms"]
        spoken = speech(list(SENTENCES), seed=0)
        again = speech(SENTENCES[0], seed=0)
    assert all(1.0 < one.duration < 6.0 for one in spoken)
    assert abs(again.duration - spoken[0].duration) < 1.0
    sounds = []
    for at, one in enumerate(spoken):
        one.save(tmp_path / f"{at}.wav")
        sounds.append(decode_audio(tmp_path / f"{at}.wav"))
        assert 0.02 < float(np.sqrt(np.mean(sounds[-1] ** 2))) < 0.3
    with Transcription("whisper-base", threads=1) as ears:
        heard = [result.text for result in ears(sounds, language="en", temperature=0.0)]
    rate = error_rate(list(zip([text.replace("Dr.", "doctor") for text in SENTENCES], heard, strict=True)))
    # A dozen words more or less are chance at 38 words; a voice that lost its letters or its codec is far above.
    assert rate < 0.35, heard


def test_its_weights_are_small_and_their_licences_beside_them() -> None:
    spec = find("motet-voice")
    assert spec is not None and spec.kind == "tts"
    folder = spec.locate()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 22_000_000
    assert max(path.stat().st_size for path in files) <= 15_000_000
    assert (folder / "LICENSE-flite.txt").is_file()

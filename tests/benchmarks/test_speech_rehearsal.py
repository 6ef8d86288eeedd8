"""benchmarks/speech.py at sizes that mean nothing, on a voice with random weights; and the arithmetic of a listener."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from motet.benchmarks import speech
from motet.benchmarks.claims import KEYS
from motet.benchmarks.speech_claims.listener import RATE, Heard

from ..tiny import tiny_picture, tiny_voice


def test_a_rehearsal_measures_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voice, pictures = tiny_voice(tmp_path / "voice"), tiny_picture(tmp_path / "pictures")
    monkeypatch.setattr(speech, "REHEARSAL", dataclasses.replace(speech.REHEARSAL, streams=(1, 2)))
    out = tmp_path / "rows.json"
    models = ["--model", str(voice), "--pictures", str(pictures)]
    assert speech.main(["--rehearse", "--threads", "1", *models, "--json", str(out)]) == 0
    rows = {row["claim"]: row for row in json.loads(out.read_text())}
    assert list(rows) == ["rtf", "first_audio_ms", "streams", "codec8", "smooth_beside_images"]
    for row in rows.values():
        assert list(row) == list(KEYS)
        assert row["ours"] is not None and row["ours"] >= 0
        assert row["holds"] is False and row["why"].startswith("a rehearsal")
    assert rows["rtf"]["ours"] > 0 and rows["first_audio_ms"]["ours"] > 0
    assert rows["smooth_beside_images"]["ours"] > 0 and "2 listeners" in rows["smooth_beside_images"]["why"]
    assert rows["codec8"]["ratio"] == pytest.approx(rows["codec8"]["ours"] / rows["codec8"]["peer"])


@pytest.mark.parametrize(
    ("pieces", "waited"),
    [
        ([(0.1, RATE)], 0.0),
        ([(0.1, RATE), (1.0, RATE), (2.0, RATE)], 0.0),
        ([(0.1, RATE), (1.3, RATE)], 0.2),
        ([(0.1, RATE), (1.3, RATE), (2.2, RATE), (3.4, RATE)], 0.3),  # the first wait moves all that follows
    ],
)
def test_how_long_a_listener_waited(pieces: list[tuple[float, int]], waited: float) -> None:
    assert Heard(pieces=pieces).lateness_s() == pytest.approx(waited)

"""benchmarks/asr.py without its peer: the engine's claims at sizes that mean nothing, the server's on a scripted server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from motet.benchmarks import asr, peer_worker
from motet.benchmarks.asr_claims import long_file, own_modes
from motet.benchmarks.peer_worker import PeerError
from motet.deploy.speech_demo import Heard
from motet.pipelines.media import encode_wav

from ..deploy.test_speech_demo import ScriptedServer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Path:
        raise PeerError(f"{name} cannot be built (status 1): no network")

    monkeypatch.setattr(peer_worker, "build", absent)
    for module in (long_file, own_modes):
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
    sizes = dataclasses.replace(
        asr.REHEARSAL,
        others=(),
        long_s=4.0,
        num_clips=2,
        min_clip_s=2.0,
        live_s=1.0,
        hours=9 / 3600,
        flat_from_s=4.0,
        drift_hours=20 / 3600,
        num_drift=1,
    )
    monkeypatch.setattr(asr, "REHEARSAL", sizes)


def rows_of(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    assert asr.main(["--rehearse", "--threads", "1", "--json", str(tmp_path / "rows.json"), *arguments]) == 0
    return {row["claim"]: row for row in json.loads((tmp_path / "rows.json").read_text())}


def test_a_rehearsal_measures_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path, "--only", "long_tiny_en,clips16,diarize,rss_gb")
    assert list(rows) == ["long_tiny_en", "clips16", "rss_gb", "diarize"]
    long = rows["long_tiny_en"]
    assert (
        long["peer"] is None and "no network" in long["why"] and long["ours"] > 0 and "word error rate" in long["why"]
    )
    assert rows["clips16"]["ratio"] > 0 and "2 clips" in rows["clips16"]["why"]
    assert rows["diarize"]["peer"] > 0 and "speakers found" in rows["diarize"]["why"]
    assert 0.1 < rows["rss_gb"]["ours"] == rows["rss_gb"]["ratio"] and "1 clips in a file" in rows["rss_gb"]["why"]
    assert all("a rehearsal" in row["why"] and row["holds"] is False for row in rows.values())
    assert "whisper-tiny.en" in capsys.readouterr().out


class ServerInThread:
    """In the place of motet_server.Server."""

    def __init__(self, setting: asr.Setting) -> None:
        self.port = 0
        self._server = ScriptedServer()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        async with self._server.running():
            self.port = int(self._server.url.rpartition(":")[2])
            self._ready.set()
            await self._stop.wait()

    def wait(self) -> None:
        assert self._ready.wait(5)

    def __enter__(self) -> ServerInThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


def test_a_rehearsal_measures_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asr, "Server", ServerInThread)
    short = [dataclasses.replace(clip, samples=clip.samples[:12_000]) for clip in asr.speech_demo.clips()]
    monkeypatch.setattr(asr.speech_demo, "clips", lambda: short)
    rows = rows_of(tmp_path, "--only", "live20,final_ms")
    assert rows["live20"]["peer"] is None and "2 streams" in rows["live20"]["why"]
    assert rows["final_ms"]["unit"] == "ms" and "150 ms of silence included" in rows["final_ms"]["why"]


def told(when: float, kind: str, **message: Any) -> tuple[float, dict[str, Any]]:
    return when, {"type": kind, **message}


def test_the_times_of_a_stream() -> None:
    heard = Heard(
        log=[
            told(0.2, "speech", what="started", at=0.0),
            told(1.2, "partial", committed="a"),
            told(3.0, "speech", what="stopped", at=2.9),
            told(3.4, "segment", start=0.0, end=2.0, text="a"),
            told(3.5, "segment", start=2.0, end=2.95, text="b"),
            told(4.0, "speech", what="started", at=3.9),
            told(5.1, "speech", what="stopped", at=5.0),
            told(7.0, "segment", start=4.0, end=4.8, text="c"),
            told(8.0, "done"),
        ]
    )
    assert asr.closing_latencies_s(heard) == pytest.approx([0.6, 2.0])
    assert asr.text_gaps_s(heard) == pytest.approx([1.0, 1.8, 1.1])
    assert asr.quantile([1.0, 2.0, 3.0, 4.0], 0.95) == 4.0
    assert asr.quantile([], 0.5) == 0.0


def test_audio_is_whole_recordings(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(encode_wav(np.full(16_000 * (number + 1), 0.1, np.float32)))
    (tmp_path / "transcripts.tsv").write_text(
        "file\tseconds\ttext\n" + "".join(f"{number}.wav\t{number + 1}\tword {number}\n" for number in range(3))
    )
    speech = asr.read_speech(tmp_path)
    setting = asr.Setting(
        model="m", engine=asr.EngineConfig(), threads=1, speech=speech,
        sizes=dataclasses.replace(asr.Sizes(), gap_s=0.5, num_clips=4),
    )  # fmt: skip
    samples, text = setting.long_audio(9.0)
    assert text == "word 0 word 1 word 2 word 0"
    assert len(samples) == 16_000 * (1 + 2 + 3 + 1 + 4 * 0.5)
    clips = setting.clips()
    assert [round(clip.seconds, 3) for clip in clips] == [7.5, 7.5, 7.5, 7.5]
    assert clips[0].text == "word 0 word 1 word 2"
    turned, text = asr._rotated(dataclasses.replace(setting, sizes=dataclasses.replace(setting.sizes, live_s=3.0)), 4)
    assert text == "word 1 word 2"

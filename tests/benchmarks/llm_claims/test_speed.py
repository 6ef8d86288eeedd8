"""Rows of speed claims from what a contest gave; peers' command lines; files that another program makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from motet.benchmarks import peer_worker
from motet.benchmarks.llm_claims import peers, speed
from motet.benchmarks.llm_claims.contest import OURS, Outcome, Peer
from motet.benchmarks.llm_claims.engine import _int8_told, p99
from motet.benchmarks.llm_claims.setting import REHEARSAL, Setting
from motet.benchmarks.peer_worker import PeerError
from motet.engine.config import EngineConfig


def outcome(**figures: list[float]) -> Outcome:
    return Outcome(names={key: f"{key} 1.0" for key in figures}, figures={"streams": figures})


def test_a_row_beside_the_best_peer_names_all_and_whoever_is_missing() -> None:
    found = outcome(slow=[10.0, 12.0, 11.0], fast=[20.0, 22.0, 90.0], ours=[33.0, 1.0, 35.0])
    found.lost["vllm"] = "no compiler"
    row = speed._versus("streams16_vs_best", found, "streams", None, "16 streams")
    assert (row.ours, row.peer, row.ratio, row.holds, row.runs) == (33.0, 22.0, 1.5, True, 3)
    assert row.peer_name == "fast 1.0" and row.ours_name == "ours 1.0"
    assert "slow 11.0" in row.why and "vllm missing: no compiler" in row.why


def test_a_row_beside_one_peer_needs_that_peer() -> None:
    found = outcome(llamacpp=[10.0], ours=[12.0])
    assert speed._versus("decode_q8_0", found, "streams", "llamacpp", "").holds
    assert not speed._versus("decode_q4_1", found, "streams", "llamacpp", "").holds
    found.lost["vllm"] = "no compiler"
    row = speed._versus("streams16_vs_vllm", found, "streams", "vllm", "")
    assert (row.ours, row.peer, row.holds, row.why) == (12.0, None, False, "no compiler")


@pytest.mark.parametrize(("long", "holds"), [(64.9, False), (65.0, True)])
def test_int8_keys_and_values_have_a_target_of_their_own(long: float, holds: bool) -> None:
    told, reached = _int8_told({("int8", 64): 100.0, ("int8", 4096): long}, (64, 4096))
    assert reached is holds and ("NOT" in told) is not holds


def test_p99_is_near_the_largest_of_many() -> None:
    assert p99([1.0] * 98 + [50.0, 100.0]) == pytest.approx(50.5)
    assert p99([7.0]) == 7.0


class Recorded:
    """In the place of a PeerWorker: keeps its command line."""

    def __init__(self, command: list[Any]) -> None:
        self.command = [str(part) for part in command]


def test_each_peer_is_started_on_the_same_file_threads_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_worker, "build", lambda name: Path("/venvs") / name)
    monkeypatch.setattr(peers, "PeerWorker", Recorded)
    monkeypatch.setattr(peers, "made_by", lambda command, what: Path("/made"))
    setting = Setting(
        model="m", path=Path("/m.gguf"), text=[1], engine=EngineConfig(), threads=3, sizes=REHEARSAL, peers=peers.NAMES
    )
    for key, environment in peers.ENVIRONMENTS.items():
        command: list[str] = peers.start(key, setting, streams=5, context=256).command  # type: ignore[attr-defined]
        assert command[0] == f"/venvs/{environment}/bin/python"
        assert (peers.PEERS / Path(command[1]).name).is_file()
        assert "/made" in command if key == "vllm" else "/m.gguf" in command
        assert command[-6:] == ["--streams", "5", "--threads", "3", "--context", "256"]
        if "openvino" in key:
            assert command[command.index("--hint") + 1] == key[-len(key.split("-")[1]) :]
    assert (
        "/other.gguf"
        in peers.start(  # type: ignore[attr-defined]
            "llamacpp", setting, gguf=Path("/other.gguf"), streams=1, context=256
        ).command
    )
    with pytest.raises(PeerError, match="left out"):
        peers.start("vllm", Setting(**{**vars(setting), "peers": ("llamacpp",)}), streams=1, context=256)


def test_a_program_that_makes_a_file_says_where_or_why_not() -> None:
    assert peers.made_by([sys.executable, "-c", "print('noise'); print('/a b/c')"], what="it") == Path("/a b/c")
    with pytest.raises(PeerError, match="it cannot be made: no luck"):
        peers.made_by([sys.executable, "-c", "raise SystemExit('no luck')"], what="it")


def test_a_peer_that_gives_fewer_tokens_than_asked_is_no_faster_for_it() -> None:
    class Lazy:
        name = "lazy"

        def cpu_s(self) -> float:
            return 0.0

        def ask(self, command: dict[str, Any]) -> dict[str, Any]:
            return {"tokens": 3, "seconds": 0.5}

    peer = Peer(Lazy())  # type: ignore[arg-type]
    assert peer.seconds([1], 3) == 0.5 and peer.streams([[1]], 3) == 6.0
    with pytest.raises(PeerError, match="3 tokens instead of 4"):
        peer.streams([[1], [2]], 2)


def test_ours_is_the_name_of_our_own_contestant() -> None:
    assert OURS not in peers.ENVIRONMENTS

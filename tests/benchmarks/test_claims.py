"""Rows, their JSON and the table; the command line of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motet.benchmarks import claims, llm
from motet.benchmarks.claims import Claim

RATIO = Claim(id="speed", better="higher", target=0.95, unit="tokens/s")
SHARE = Claim(id="share", better="lower", target=0.15, unit="ms")
ABSOLUTE = Claim(id="extra_ms", better="lower", target=3.0, unit="ms", absolute=True)


@pytest.mark.parametrize(
    ("claim", "ours", "peer", "ratio", "holds"),
    [
        (RATIO, 96.0, 100.0, 0.96, True),
        (RATIO, 94.0, 100.0, 0.94, False),
        (SHARE, 15.0, 100.0, 0.15, True),
        (SHARE, 16.0, 100.0, 0.16, False),
        (ABSOLUTE, 2.9, None, 2.9, True),
        (ABSOLUTE, 3.1, None, 3.1, False),
    ],
)
def test_a_claim_holds_by_its_ratio_or_by_the_figure_itself(
    claim: Claim, ours: float, peer: float | None, ratio: float, holds: bool
) -> None:
    row = claims.measured(claim, ours, peer, runs=5)
    assert (row.ratio, row.holds) == (pytest.approx(ratio), holds)


def test_a_ratio_needs_its_peer_and_an_absolute_target_has_none() -> None:
    with pytest.raises(ValueError, match="speed"):
        claims.measured(RATIO, 1.0, runs=5)
    with pytest.raises(ValueError, match="extra_ms"):
        claims.measured(ABSOLUTE, 1.0, 1.0, runs=5)


def test_json_has_the_fixed_keys_and_a_missing_peer_does_not_hold(tmp_path: Path) -> None:
    rows = [
        claims.measured(RATIO, 3.0, 2.0, peer_name="other 1.0, bf16", ours_name="ours, bf16", runs=5, why="so"),
        claims.failed(SHARE, "no compiler", ours=1.0),
    ]
    claims.write_json(rows, tmp_path / "rows.json")
    first, second = json.loads((tmp_path / "rows.json").read_text())
    assert list(first) == list(second) == list(claims.KEYS)
    assert first["ratio"] == 1.5 and first["holds"] is True and first["peer_name"] == "other 1.0, bf16"
    assert second["peer"] is None and second["holds"] is False and second["why"] == "no compiler"
    text = claims.table(rows)
    assert "ours, bf16" in text and "other 1.0, bf16" in text and "no compiler" in text and claims.machine() in text


def test_claims_of_a_later_version_are_named_as_such() -> None:
    parser = claims.make_parser("x", [RATIO], ["speed_of_sound"])
    assert parser.parse_args([]).only == ["speed"]
    assert parser.parse_args(["--only", "speed_of_sound,speed"]).only == ["speed", "speed_of_sound"]
    row = claims.not_yet("speed_of_sound")
    assert (row.ours, row.holds, row.why) == (None, False, "not measured yet")
    assert "speed_of_sound" in claims.table([row]) and "not measured yet" in claims.table([row])


def test_an_unknown_claim_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        llm.main(["--only", "prefix_ttft,speed_of_light"])
    assert exit_.value.code == 2
    assert "speed_of_light" in capsys.readouterr().err

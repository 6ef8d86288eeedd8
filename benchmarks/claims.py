"""What every benchmark shares: claims with targets, rows as JSON and as a table, the command line, the machine's name.

A claim is a number of ours beside a peer's, measured in one run. `ratio` = ours / peer; a claim with an absolute target has
no peer and `ratio` = ours. A claim that could not be measured is a row too: it does not hold, and `why` says what happened.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

# The keys of a row in the JSON file, in their order.
KEYS = (
    "claim", "ours", "peer", "peer_name", "ratio", "better", "target", "holds", "unit", "runs", "machine", "why"
)  # fmt: skip
NOT_YET = "not measured yet"
OURS_FAILED = "ours failed: "


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of the table before it is measured. `target` bounds the ratio, in `unit`s when there is no peer."""

    id: str
    better: Literal["higher", "lower"]
    target: float
    unit: str  # of ours and of the peer
    absolute: bool = False  # no peer: the target is in `unit`s


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured claim. `ours` and `peer` are medians; `ours_name` goes into the table only."""

    claim: str
    ours: float | None
    peer: float | None
    peer_name: str | None
    ratio: float | None
    better: Literal["higher", "lower"]
    target: float | None
    holds: bool
    unit: str
    runs: int  # pairs, or rounds in which everybody had a turn
    machine: str
    why: str
    ours_name: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in KEYS}


def measured(
    claim: Claim,
    ours: float,
    peer: float | None = None,
    *,
    peer_name: str | None = None,
    ours_name: str = "",
    runs: int,
    why: str = "",
) -> Row:
    """The row of a claim that was measured; `peer` may be missing for an absolute target only."""
    if (peer is None) != claim.absolute:
        raise ValueError(f"{claim.id}: a peer's figure is {'not ' if claim.absolute else ''}expected")
    ratio = ours if peer is None else (ours / peer if peer else math.inf)
    holds = ratio >= claim.target if claim.better == "higher" else ratio <= claim.target
    return _row(
        claim, ours=ours, peer=peer, peer_name=peer_name, ratio=ratio, holds=holds, runs=runs, why=why,
        ours_name=ours_name,
    )  # fmt: skip


def failed(
    claim: Claim,
    why: str,
    *,
    ours: float | None = None,
    peer_name: str | None = None,
    ours_name: str = "",
    runs: int = 0,
) -> Row:
    """The row of a claim whose peer, or we, could not be measured."""
    return _row(
        claim, ours=ours, peer=None, peer_name=peer_name, ratio=None, holds=False, runs=runs, why=why,
        ours_name=ours_name,
    )  # fmt: skip


def attempt(
    table: Mapping[str, Claim],
    names: Sequence[str],
    measure: Callable[[], list[Row]],
    errors: tuple[type[Exception], ...],
) -> dict[str, Row]:
    """What `measure` gives for the claims `names`; when it raises one of `errors`, a row for each that says so."""
    try:
        return {row.claim: row for row in measure()}
    except errors as error:
        print(f"  {OURS_FAILED}{error}", flush=True)
        return {name: failed(table[name], f"{OURS_FAILED}{error}") for name in names}


def report(rows: Sequence[Row], *, rehearsed: bool, json_file: Path | None) -> int:
    """Print the table, write the file; the exit status: 1 when we ourselves failed at a claim. A rehearsal holds nothing."""
    broken = any(row.why.startswith(OURS_FAILED) for row in rows)
    if rehearsed:
        # Nobody shall quote these: not even by accident, out of a file.
        rows = [replace(row, holds=False, why=f"a rehearsal; {row.why}") for row in rows]
    print("\n" + table(rows), flush=True)
    if json_file:
        write_json(rows, json_file)
    return 1 if broken else 0


def not_yet(claim_id: str) -> Row:
    """The row of a claim id that is fixed already and measured by a later version."""
    return Row(
        claim=claim_id, ours=None, peer=None, peer_name=None, ratio=None, better="higher", target=None, holds=False,
        unit="", runs=0, machine=machine(), why=NOT_YET,
    )  # fmt: skip


def _row(claim: Claim, **values: Any) -> Row:
    return Row(claim=claim.id, better=claim.better, target=claim.target, unit=claim.unit, machine=machine(), **values)


# --------------------------------------------------------------------------------------------------- the command line


def make_parser(description: str | None, claims: Sequence[Claim], later: Sequence[str]) -> argparse.ArgumentParser:
    """A benchmark's parser with `--json` and `--only`; `only` becomes a list of ids in the order of the table."""
    known = [*(claim.id for claim in claims), *later]

    def chosen(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"no such claim: {', '.join(unknown) or text!r}; known: {', '.join(known)}"
            )
        return [name for name in known if name in names]

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument(
        "--only", type=chosen, default=[claim.id for claim in claims], metavar="CLAIM,...", help=", ".join(known)
    )
    return parser


# ------------------------------------------------------------------------------------------------------------- output


def write_json(rows: Sequence[Row], path: Path) -> None:
    """The rows as a list of objects with the keys `KEYS`; the file appears whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    part.replace(path)


def table(rows: Sequence[Row]) -> str:
    """The rows as text: one line each, below it the names (with dtypes) and the remark of each."""
    cells = [("claim", "ours", "peer", "unit", "ratio", "target", "holds", "runs")]
    for row in rows:
        sign = ">=" if row.better == "higher" else "<="
        cells.append(
            (
                row.claim, _number(row.ours), _number(row.peer), row.unit, _number(row.ratio),
                "-" if row.target is None else f"{sign} {row.target:g}",
                NOT_YET if row.why == NOT_YET else "yes" if row.holds else "NO", str(row.runs or "-"),
            )
        )  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    lines.insert(1, "-" * max(map(len, lines)))
    for row in rows:
        names = [f"ours: {row.ours_name}" if row.ours_name else "", f"peer: {row.peer_name}" if row.peer_name else ""]
        told = "; ".join(part for part in (*names, "" if row.why == NOT_YET else row.why) if part)
        if told:
            lines += textwrap.wrap(f"{row.claim}: {told}", 118, subsequent_indent="    ")
    lines.append(f"{machine()}; {datetime.datetime.now().astimezone():%d %b %Y %H:%M %Z}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


# -------------------------------------------------------------------------------------------------------- the machine


def machine() -> str:
    """Processor, cores this process may use, the features that matter here, memory, torch."""
    about = _first_processor()
    model = about.get("model name") or platform.processor() or platform.machine()
    flags = set(about.get("flags", "").split())
    features = [
        name
        for name, present in {
            "amx": any(flag.startswith("amx") for flag in flags),
            "avx512_bf16": "avx512_bf16" in flags,
            "avx512_vnni": "avx512_vnni" in flags,
            "avx2": "avx2" in flags,
        }.items()
        if present
    ]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {' '.join(features) or 'no vector features'}, {memory:.0f} GiB, torch {torch}"


def _first_processor() -> dict[str, str]:
    """The first block of /proc/cpuinfo; nothing where there is none."""
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}

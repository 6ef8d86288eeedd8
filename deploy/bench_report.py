"""From the records of a load test to its figures, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request: how it went. Times in seconds since the first was sent; `error` is empty when it went well."""

    number: int
    sent: float
    ended: float
    arrivals: tuple[float, ...] = ()  # of chunks with text
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str = ""
    message: str = ""

    @property
    def num_tokens(self) -> int:
        """Output tokens: as the server counts them, else chunks."""
        return len(self.arrivals) if self.num_output_tokens is None else self.num_output_tokens


def figures(records: Sequence[Record], *, num_unfinished: int = 0) -> dict[str, Any]:
    """Everything that is reported, JSON-ready.

    ttft_ms           sent to the first chunk with text
    itl_ms            between chunks with text, over all requests (a chunk may bring several tokens)
    e2e_ms            sent to the end of the stream
    user_tokens_per_s of one request after its first chunk: what its reader perceives
    seconds           first sent to last ended; the rates are over that
    """
    good = [record for record in records if not record.error]
    spoken = [record for record in good if record.arrivals]
    gaps = [later - earlier for record in good for earlier, later in zip(record.arrivals, record.arrivals[1:])]
    seconds = max((r.ended for r in good), default=0.0) - min((r.sent for r in records), default=0.0) if good else 0.0
    num_output = sum(record.num_tokens for record in good)
    num_prompt = sum(record.num_prompt_tokens or 0 for record in good)
    counts = Counter(record.error for record in records if record.error)
    return {
        "requests": {"completed": len(good), "failed": len(records) - len(good), "unfinished": num_unfinished},
        "errors": {
            code: {"count": count, "message": next(r.message for r in records if r.error == code)}
            for code, count in counts.most_common()
        },
        "seconds": seconds,
        "requests_per_s": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_s": num_output / seconds if seconds else 0.0,
        "total_tokens_per_s": (num_output + num_prompt) / seconds if seconds else 0.0,
        "usage_counted": all(record.num_output_tokens is not None for record in good),
        "ttft_ms": spread([(record.arrivals[0] - record.sent) * 1e3 for record in spoken]),
        "itl_ms": spread([gap * 1e3 for gap in gaps]),
        "e2e_ms": spread([(record.ended - record.sent) * 1e3 for record in good]),
        "user_tokens_per_s": spread(
            [
                (record.num_tokens - 1) / (record.arrivals[-1] - record.arrivals[0])
                for record in spoken
                if record.num_tokens > 1 and record.arrivals[-1] > record.arrivals[0]
            ]
        ),
        "prompt_tokens": spread([float(r.num_prompt_tokens) for r in good if r.num_prompt_tokens is not None]),
        "output_tokens": spread([float(record.num_tokens) for record in good]),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles, smallest and largest; None of nothing."""
    if not values:
        return None
    found = np.percentile(np.asarray(values), PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{which}": float(value) for which, value in zip(PERCENTILES, found, strict=True)},
        "min": float(min(values)),
        "max": float(max(values)),
    }


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    rows = {
        "first token (TTFT), ms": "ttft_ms",
        "between chunks (ITL), ms": "itl_ms",
        "whole answer, ms": "e2e_ms",
        "tokens/s, as a user sees it": "user_tokens_per_s",
        "prompt tokens": "prompt_tokens",
        "output tokens": "output_tokens",
    }
    columns = ("mean", "p50", "p90", "p99", "max")
    lines = [f"{'':<30}" + "".join(f"{name:>10}" for name in columns)]
    for title, key in rows.items():
        values = report[key]
        cells = ["-"] * len(columns) if values is None else [_number(values[name]) for name in columns]
        lines.append(f"{title:<30}" + "".join(f"{cell:>10}" for cell in cells))
    requests = report["requests"]
    lines.append(
        f"{requests['completed']} requests in {report['seconds']:.2f} s: {report['requests_per_s']:.2f} requests/s, "
        f"{report['output_tokens_per_s']:.1f} output tokens/s, {report['total_tokens_per_s']:.1f} tokens/s with the prompts"
    )
    if requests["unfinished"]:
        lines.append(f"{requests['unfinished']} more were on their way when it was stopped; they do not count")
    for code, error in report["errors"].items():
        lines.append(f"failed: {error['count']} x {code}: {error['message']}")
    if requests["completed"] and not report["usage_counted"]:
        lines.append("the server gave no usage: output tokens are chunks, prompt tokens unknown")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

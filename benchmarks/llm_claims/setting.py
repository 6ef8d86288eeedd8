"""What all measurements of the language engine share: the claims with their targets, the sizes, the model and its text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from motet.benchmarks.claims import Claim
from motet.engine.config import EngineConfig

SETTLE_S = 0.5  # between turns: threads of the one before may still spin for up to 0.2 s

CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(id="streams16_vs_vllm", better="higher", target=1.0, unit="tokens/s"),
        Claim(id="streams16_vs_llamacpp", better="higher", target=1.0, unit="tokens/s"),
        Claim(id="prefix_ttft", better="lower", target=0.15, unit="ms"),
        Claim(id="server_ttft_ms", better="lower", target=3.0, unit="ms", absolute=True),
        Claim(id="server_throughput", better="higher", target=0.95, unit="tokens/s"),
        Claim(id="decode_q4_1", better="higher", target=1.3, unit="tokens/s"),
        Claim(id="decode_q4_0", better="higher", target=1.1, unit="tokens/s"),
        Claim(id="decode_q8_0", better="higher", target=1.2, unit="tokens/s"),
        Claim(id="prefill_1024", better="higher", target=1.5, unit="tokens/s"),
        Claim(id="streams16_vs_best", better="higher", target=1.5, unit="tokens/s"),
        Claim(id="streams64", better="higher", target=1.2, unit="tokens/s"),
        Claim(id="context_4096", better="higher", target=0.5, unit="tokens/s"),
        Claim(id="rss_gb", better="lower", target=1.2, unit="GB", absolute=True),
        Claim(id="chat_start_s", better="lower", target=4.0, unit="s", absolute=True),
        Claim(id="itl_p99_under_prefill", better="lower", target=2.0, unit="ms"),
    )
}
# Of context_4096: the same ratio when keys and values lie in memory as INT8.
INT8_KV_TARGET = 0.65


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    rounds: int = 5
    num_streams: int = 16
    num_prompt: int = 64
    num_new: int = 128
    num_prefill: int = 1024
    many_streams: int = 64
    num_context: int = 4096
    num_prefix: int = 1000
    num_tail: int = 32
    pairs: int = 40
    running: int = 15  # streams beside a long prompt
    num_long: int = 8000
    idle_s: float = 3.0  # for so long they run alone before it comes
    resident_prompt: int = 896  # of 1,024 tokens, whose memory is looked at


REHEARSAL = Sizes(
    rounds=1, num_streams=2, num_prompt=8, num_new=4, num_prefill=24, many_streams=4, num_context=48, num_prefix=96,
    num_tail=8, pairs=2, running=2, num_long=64, idle_s=0.05, resident_prompt=32,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share."""

    model: str
    path: Path
    text: list[int]  # ids of the licence
    engine: EngineConfig
    threads: int
    sizes: Sizes
    peers: tuple[str, ...]  # who may take part

    def prompts(self, turn: int, count: int | None = None) -> list[list[int]]:
        """Slices of the text: different ones within a turn and from turn to turn, the same for everybody in a turn."""
        number = count or self.sizes.num_streams
        return [self.slice(turn * number + index, self.sizes.num_prompt) for index in range(number)]

    def slice(self, number: int, length: int) -> list[int]:
        """The `number`th prompt of a length; one that is longer than the text goes round it."""
        start = number * 61 % max(1, len(self.text) - length)
        times = -(-(start + length) // len(self.text))
        return (self.text * times)[start : start + length]


def say(line: str) -> None:
    """Progress, on stderr: the table alone goes to stdout."""
    print(line, file=sys.stderr, flush=True)

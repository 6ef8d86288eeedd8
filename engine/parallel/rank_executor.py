"""Tensor parallelism over processes: rank 0 runs here, each other rank in a child that is sent every plan.

Plans travel as msgpack frames over the child's stdin; the ranks meet in the model's collectives. Every rank samples, but
rank 0's samples are broadcast, so that ranks can never disagree. Only rank 0 gives results.
"""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Any

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from ...models.spec import Shard
from ..config import EngineConfig
from ..errors import EngineDead
from ..executor import Handle
from ..frames import pack
from ..model_runner import ModelRunner
from ..types import StepPlan
from .comm import GroupComm


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to a child rank."""

    model: str
    rank: int
    size: int
    port: int
    config: EngineConfig
    num_blocks: int
    max_model_len: int


class RankOrder(msgspec.Struct, kw_only=True):
    """Every later frame: a plan to run, or a method of the runner to call."""

    plan: StepPlan | None = None
    verb: str = ""
    arguments: dict[str, Any] = {}


class Ranks:
    """The child ranks of one model, and this process's place among them as rank 0."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = device
        # Port 0: the store picks a free one, so that two models on one machine never collide.
        self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, model: str, config: EngineConfig, num_blocks: int, max_model_len: int) -> Shard:
        """Start the children and meet them; gives rank 0's shard."""
        for rank in range(1, self.size):
            child = subprocess.Popen(
                [sys.executable, "-m", "motet.engine.parallel.rank"], stdin=subprocess.PIPE, bufsize=0
            )
            self._children.append(child)
            setup = RankSetup(
                model=model,
                rank=rank,
                size=self.size,
                port=self._store.port,
                config=config,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
            )
            _stdin(child).write(pack(setup))
        self.comm = GroupComm(rank=0, size=self.size, store=self._store, device=self._device)
        return Shard(tp_rank=0, tp_size=self.size, comm=self.comm)  # type: ignore[arg-type]

    def send(self, order: RankOrder) -> None:
        frame = pack(order)
        for child in self._children:
            try:
                _stdin(child).write(frame)
            except OSError:
                raise EngineDead("a rank of this model has ended") from None

    def check(self) -> None:
        for child in self._children:
            if child.poll() is not None:
                raise EngineDead(f"a rank of this model has ended (exit code {child.returncode})")

    def close(self) -> None:
        for child in self._children:
            _stdin(child).close()  # a child ends when its orders do
        for child in self._children:
            try:
                child.wait(5.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class RankExecutor:
    """An executor over `Ranks`. Plans are sent before rank 0 runs its own part, so that all ranks work together."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self.runner = runner
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> Handle:
        self._ranks.check()
        self._ranks.send(RankOrder(plan=plan))
        return self.runner.launch(plan)

    def call_all(self, verb: str, **arguments: Any) -> list[Any]:
        """Runs on every rank; only rank 0's answer comes back."""
        self._ranks.send(RankOrder(verb=verb, arguments=arguments))
        return [getattr(self.runner, verb)(**arguments)]

    def health(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()


def _stdin(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdin is not None
    return child.stdin

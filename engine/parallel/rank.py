"""A child rank: `python -m motet.engine.parallel.rank`, started by `Ranks`. Runs the plans that come on stdin."""

from __future__ import annotations

import signal
import sys

import msgspec
from torch._C._distributed_c10d import TCPStore

from ...models.spec import Shard
from ..frames import read_frame
from .comm import GroupComm
from .rank_executor import RankOrder, RankSetup


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=RankSetup)
    from ..load import load_runner, pick_device

    device = pick_device(setup.config.device, setup.rank)
    store = TCPStore("127.0.0.1", setup.port, setup.size, is_master=False)
    comm = GroupComm(rank=setup.rank, size=setup.size, store=store, device=device)
    shard = Shard(tp_rank=setup.rank, tp_size=setup.size, comm=comm)  # type: ignore[arg-type]
    loaded = load_runner(
        setup.model, setup.config, shard=shard, num_blocks=setup.num_blocks, max_model_len=setup.max_model_len
    )
    decoder = msgspec.msgpack.Decoder(RankOrder)
    while (body := read_frame(sys.stdin.buffer)) is not None:
        order = decoder.decode(body)
        if order.plan is not None:
            loaded.runner.run(order.plan)
        else:
            getattr(loaded.runner, order.verb)(**order.arguments)


if __name__ == "__main__":
    main()

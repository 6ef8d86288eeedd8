"""CUDA graphs: calls recorded once and replayed as one launch. Knows no models; needs no Triton.

What a recorded call reads must stay at its address: the caller writes new inputs into the same tensors. Graphs of one
recorder share a memory pool, so record the largest first, and use what one graph made before replaying another.

Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2  # calls before the recording: kernels are compiled and workspaces made there, which a recording must not


class GraphRecorder:
    """`record(call)` gives a function that replays what `call` queued. One device, one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's handle

    def record(self, call: Callable[[], object]) -> Callable[[], None]:
        """Run `call` a few times, record it, return its replay. Raises RuntimeError when it cannot be recorded."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Another thread of the host may be loading a model meanwhile; its allocations are none of ours.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                call()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay

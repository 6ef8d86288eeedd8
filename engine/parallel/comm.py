"""Collectives among the ranks of one model: a process group object of torch.distributed, not its global state."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d


class GroupComm:
    """Collectives over gloo (CPU) or NCCL (CUDA). Each rank calls them in the same order."""

    def __init__(
        self, *, rank: int, size: int, store: c10d.Store, device: torch.device, timeout_s: float = 60.0
    ) -> None:
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # torch ships no types for the collectives of these classes
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = c10d.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = c10d.ProcessGroupGloo(store, rank, size, timeout)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x."""
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors side by side along `dim`, in rank order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values on every rank, in place; returns x."""
        self._group.broadcast([x]).wait()
        return x

"""Between host and device without waiting: inputs through two staging slots, results through an event each.

With one plan in flight the host writes the next step's tables while the device still reads this step's. So each table
goes through one of two slots, host memory and device memory, and a slot is written again only after the event that was
recorded when its step had been queued. A result is copied to the host right behind the step that made it, and waited
for by its own event: waiting for the stream would wait for the next step too.

`Transfers` is what the hardware offers; the tests put a device behind it that is late on purpose. On a CPU none of this
is used. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

ALIGNMENT = 16  # bytes; kernels load 16 at a time


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor [n] for keeping. On CUDA it is copied without waiting; torch keeps the host side until it is."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Event(Protocol):
    def synchronize(self) -> None:
        """Wait until everything queued before the event was recorded is done."""
        ...


class Transfers(Protocol):
    """One stream of a device: what is queued happens in order, later."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 on the host, page-locked so that copies need not wait."""
        ...

    def device_memory(self, num_bytes: int) -> torch.Tensor: ...
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        ...

    def record(self) -> Event:
        """An event behind everything queued so far."""
        ...


class CudaTransfers:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Slot:
    """Memory that one step's inputs go through, in chunks that are added as a step needs more."""

    def __init__(self) -> None:
        self.chunks: list[tuple[torch.Tensor, torch.Tensor]] = []  # (host, device)
        self.chunk = 0
        self.used = 0  # bytes of the present chunk
        self.event: Event | None = None

    def reset(self) -> None:
        self.chunk = self.used = 0
        self.event = None


class StagedInputs:
    """Host arrays on their way to the device. `with staged.step():` around everything that queues a step's work."""

    def __init__(self, transfers: Transfers, *, num_slots: int = 2, chunk_bytes: int = 1 << 20) -> None:
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes
        self._slots = [_Slot() for _ in range(num_slots)]
        self._turn = 0
        self._is_open = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Turn to the other slot, waiting for the step that used it last; leave it guarded by an event."""
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        if slot.event is not None:
            slot.event.synchronize()
        slot.reset()
        self._is_open = True
        try:
            yield
        finally:  # also after an error: what was queued before it still reads the slot
            self._is_open = False
            slot.event = self._transfers.record()

    def put(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """The array on the device, in memory that is this step's. The array may be changed at once."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        slot = self._slots[self._turn]
        host, device = self._room(slot, source.nbytes)
        host_view = host.view(source.dtype).view(source.shape)
        host_view.copy_(source)
        device_view = device.view(source.dtype).view(source.shape)
        self._transfers.copy(device_view, host_view)
        if not self._is_open:  # between steps: the last one's event does not cover this copy
            slot.event = self._transfers.record()
        return device_view

    def _room(self, slot: _Slot, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`num_bytes` of the slot that this step has not used."""
        while slot.chunk < len(slot.chunks):
            host, device = slot.chunks[slot.chunk]
            if slot.used + num_bytes <= host.numel():
                where = slice(slot.used, slot.used + num_bytes)
                slot.used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
                return host[where], device[where]
            slot.chunk += 1
            slot.used = 0
        size = max(self._chunk_bytes, num_bytes)
        slot.chunks.append((self._transfers.host_memory(size), self._transfers.device_memory(size)))
        return self._room(slot, num_bytes)


class Readback:
    """Results on their way to the host, each in memory of its own until it was read."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._free: list[torch.Tensor] = []

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a copy of `tensor`; the function waits for that copy alone and gives it. Call it once."""
        fitting = next((i for i, memory in enumerate(self._free) if memory.numel() >= tensor.nbytes), None)
        memory = (
            self._free.pop(fitting) if fitting is not None else self._transfers.host_memory(max(tensor.nbytes, 4096))
        )
        host = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._transfers.copy(host, tensor)
        event = self._transfers.record()

        def result() -> torch.Tensor:
            event.synchronize()
            value = host.clone()
            self._free.append(memory)
            return value

        return result

"""A stage: a worker thread with a bounded queue and, on CUDA, a stream of its own.

Stages work beside each other and beside the host's loop, which hands work in with `offer` and fetches what came of it with
`take`. On CUDA the loop's stream waits for a result by event, on the device; no thread waits for the device.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


@dataclass(eq=False, kw_only=True)
class Job:
    """`work()` runs in the stage's thread; then `result` or `error` is set. A cancelled job that has not begun never runs."""

    owner: Any
    work: Callable[[], Any]
    after: torch.cuda.Event | None = None  # what the work reads is there from this event on
    cancelled: bool = False
    result: Any = None
    error: BaseException | None = None
    event: torch.cuda.Event | None = None


Watch: TypeAlias = Callable[
    [str, float, float], None
]  # stage, begin and end of what it did in seconds of time.perf_counter


class Stage:
    """`bound` jobs at most are inside: waiting, at work, or finished and not taken."""

    def __init__(self, name: str, device: torch.device, *, bound: int) -> None:
        self.name = name
        self.device = device
        self.bound = bound
        self.busy_s = 0.0
        self.watch: Watch | None = None
        self._num_inside = 0  # only the loop counts
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._finished: deque[Job] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name=f"motet-{name}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- the loop's side

    @property
    def has_room(self) -> bool:
        return self._num_inside < self.bound

    @property
    def num_inside(self) -> int:
        return self._num_inside

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def offer(self, job: Job) -> None:
        """Hand in a job. Only with room."""
        assert self.has_room
        self._num_inside += 1
        self._queue.put(job)

    def take(self) -> Iterator[Job]:
        """Jobs that have ended, also cancelled ones; their results may be used on the caller's current stream."""
        while self._finished:
            job = self._finished.popleft()
            self._num_inside -= 1
            if job.event is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(job.event)
                _record(job.result, stream)
            yield job

    def mark(self) -> torch.cuda.Event | None:
        """What the caller's stream has been given up to now, for `Job.after`."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def close(self) -> None:
        """The thread ends after the job that it is at; others are dropped."""
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._queue.put(None)

    # -------------------------------------------------------------------------------------------- the thread's side

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            began = time.perf_counter()
            if not job.cancelled:
                try:
                    self._work(job)
                except BaseException as error:
                    job.error = error
            ended = time.perf_counter()
            self.busy_s += ended - began
            if self.watch is not None:
                self.watch(self.name, began, ended)
            self._finished.append(job)
            del job  # what it holds is the loop's to drop

    @torch.inference_mode()
    def _work(self, job: Job) -> None:
        if self._stream is None:
            job.result = job.work()
            return
        with torch.cuda.stream(self._stream):
            if job.after is not None:
                self._stream.wait_event(job.after)
            job.result = job.work()
            job.event = torch.cuda.Event()
            job.event.record(self._stream)


def _record(value: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` uses the tensors in `value`, so that they are not reused under it once freed."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, dict):
        _record(list(value.values()), stream)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _record(part, stream)
    elif dataclasses.is_dataclass(value):
        _record([getattr(value, part.name) for part in dataclasses.fields(value)], stream)

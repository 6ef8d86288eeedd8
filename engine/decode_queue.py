"""Windows that wait their turn: by priority, then by who is waited for, then in the order they came. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from .decode_job import DecodeJob


class DecodeQueue:
    """A heap of jobs by their key."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], DecodeJob]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[DecodeJob]:
        """In no order."""
        return (job for _, job in self._heap)

    def push(self, job: DecodeJob) -> None:
        heapq.heappush(self._heap, (job.key, job))

    def first(self) -> DecodeJob:
        return self._heap[0][1]

    def pop(self) -> DecodeJob:
        return heapq.heappop(self._heap)[1]

    def remove(self, jobs: list[DecodeJob]) -> None:
        gone = {id(job) for job in jobs}
        self._heap = [entry for entry in self._heap if id(entry[1]) not in gone]
        heapq.heapify(self._heap)

    def of(self, owner: object) -> list[DecodeJob]:
        return [job for job in self if job.owner is owner]

    def able(self, most: int) -> list[DecodeJob]:
        """At most `most` jobs in order that may start now. Of a recording whose language is not known yet, one may."""
        asked: set[int] = set()
        able: list[DecodeJob] = []
        for _, job in sorted(self._heap, key=lambda entry: entry[0]):
            choice = job.language
            if choice.code is None:
                if choice.busy or id(choice) in asked:
                    continue
                asked.add(id(choice))
            able.append(job)
            if len(able) == most:
                break
        return able

    def earliest_due(self) -> float:
        return min((job.due for job in self), default=math.inf)

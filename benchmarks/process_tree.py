"""A process and all its descendants, from /proc: who they are, and how much memory they hold together."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def descendants(root: int) -> list[int]:
    """`root` and every living process below it."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [root] if _parent(root) is not None else []
    for pid in found:  # grows while it is read
        found.extend(children.get(pid, ()))
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size: own pages, and of each shared page the share of one of those who map it. 0 when gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class PssWatch:
    """Looks at a process tree's memory from a thread, again and again, and keeps the most. Use as a context manager."""

    def __init__(self, root: int, *, every_s: float = 0.1) -> None:
        self.most_bytes = 0
        self.num_processes = 0
        self.num_looks = 0
        self._root = root
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pss-watch")

    def __enter__(self) -> PssWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()  # at the end, too

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        pids = descendants(self._root)
        total = sum(map(pss_bytes, pids))
        self.num_looks += 1
        if total > self.most_bytes:
            self.most_bytes, self.num_processes = total, len(pids)


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])

"""The CPU threads of a process that runs engines: one budget, and threads that wait asleep. Torch-free.

Takes effect only before torch is first imported, because OpenMP reads its environment once.
"""

from __future__ import annotations

import os


def prepare_threads(threads: int) -> None:
    """Set OpenMP's environment, leaving alone what the user has set. `threads` 0: all cores.

    Between two parallel regions a thread spins a few microseconds (which costs a decode step nothing) and then sleeps.
    GNU OpenMP's own default spins for milliseconds and takes the core from the server beside it; and where the cores are
    busy with something else, every region then waits for a whole time slice (8 ms instead of 60 us for an attention call).
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or os.cpu_count() or 1))
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

"""The CPU threads of a process that runs engines: one budget, and threads that wait asleep. Torch-free.

Takes effect only before torch is first imported, because OpenMP reads its environment once.
"""

from __future__ import annotations

import os


def prepare_threads(threads: int) -> None:
    """Set OpenMP's environment, leaving alone what the user has set. `threads` 0: all cores.

    Between two parallel regions a thread spins for about 0.2 ms, then sleeps. Less would not outlast the Python between the
    regions of a one-row decode step (measured: 2,000 spins gave 25 to 46 tokens/s where 60,000 and more give 160 to 190,
    since waking a core takes long in a virtual machine); GNU OpenMP's own default is five times as long, and that is
    time taken from the server beside it after every step.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or os.cpu_count() or 1))
    os.environ.setdefault("GOMP_SPINCOUNT", "60000")

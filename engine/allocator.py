"""Memory of a process that runs engines: blocks that the C allocator keeps, pages taken before they are needed. Torch-free.

A forward pass asks for the same few megabytes again and again. By default glibc gives such blocks back to the system when
they are freed, and their pages are zeroed and mapped anew at the next pass: a seventh of the time that Whisper tiny's
encoder takes for a window (58 -> 49 ms on two cores of an EPYC Zen 5), a fourteenth of base's.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGEST_KEPT = 32 << 20  # glibc's own limit for blocks that live on the heap
_MOST_IDLE = 256 << 20  # more than so much free memory at the heap's end does go back


def keep_freed_memory() -> bool:
    """Let freed blocks of up to 32 MiB stay with the process, 256 MiB of them at most. False where this is not glibc.

    For processes of our own: an application that embeds the SDK decides for itself.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, _MOST_IDLE))


def release_freed_memory() -> None:
    """Give back what is free now in spite of `keep_freed_memory`: after a load, which needs more than any step."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def take_pages(address: int, size: int) -> bool:
    """Let the system back this part of our memory now, contents unchanged. False where it does not know how.

    Else the first write to each page waits for it: up to 8 us each on a virtual machine, 6 % of a language model's speed until
    its cache has been written once.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if last <= first:
        return True
    return madvise(first, last - first, _POPULATE_WRITE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


class BlocksAhead:
    """Takes memory for blocks of a cache shortly before they are handed out, a few a step.

    Streams that began together need their next blocks in the same step. Where that memory is new, the step waits for some
    hundred pages: 5 to 10 ms beside 15 streams, every 16 tokens, which is their 99th percentile. Only a cache that has
    outgrown what was taken at its start costs anything here.
    """

    AHEAD = 32  # blocks; one of these is taken in a step, two where all are missing
    # Blocks beyond the start, from which on a cache grows: those that a few streams end in cost no memory ahead.
    GROWN = 16

    def __init__(self, arenas: Sequence[tuple[int, int]], *, num_blocks: int, num_backed: int) -> None:
        """`arenas`: where each part of the cache starts, and the bytes of a block in it."""
        self._arenas = arenas
        self._num_blocks = num_blocks
        self._start = num_backed
        self.num_backed = num_backed  # blocks that have memory, or are being written anyway
        self._grows = False

    def used(self, highest: int) -> None:
        """A step is done, and `highest` is the highest block that was handed out."""
        self._grows = self._grows or highest >= self._start + self.GROWN
        if not self._grows:
            return
        self.num_backed = max(self.num_backed, highest + 1)
        missing = min(self._num_blocks, highest + 1 + self.AHEAD) - self.num_backed
        if missing <= 0:
            return
        first, count = self.num_backed, min(missing, max(1, missing // 16))
        self.num_backed += count
        for address, size in self._arenas:
            take_pages(address + first * size, count * size)

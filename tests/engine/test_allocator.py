"""Freed memory that stays: counted in page faults, in a child process, since the setting cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from motet.engine import allocator
from motet.engine.allocator import BlocksAhead

_COUNT = """
import resource, sys
if sys.argv[1] == "keep":
    from motet.engine.allocator import keep_freed_memory
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def once():
    parts = [bytearray(8 << 20) for _ in range(3)]
    return sum(part[0] for part in parts)
once()
before = faults()
for _ in range(10):
    once()
print(faults() - before)
"""


def _faults(mode: str) -> int:
    child = subprocess.run([sys.executable, "-c", _COUNT, mode], capture_output=True, text=True, check=True)
    return int(child.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_second_pass_meets_the_pages_of_the_first() -> None:
    pages_of_a_pass = 3 * (8 << 20) // 4096
    assert _faults("default") > pages_of_a_pass  # else there is nothing to win here
    assert _faults("keep") < pages_of_a_pass


_TAKE = """
import mmap, resource
from motet.engine.allocator import take_pages
size = 16 << 20
memory = mmap.mmap(-1, size)
view = (ctypes.c_char * size).from_buffer(memory)
address = ctypes.addressof(view)
view[12345] = b"x"
assert take_pages(address + 100, size - 200)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for at in range(8192, size - 8192, 4096):
    view[at] = b"y"
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, view[12345].decode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_pages_that_were_taken_are_there_with_what_they_held() -> None:
    child = subprocess.run([sys.executable, "-c", "import ctypes" + _TAKE], capture_output=True, text=True, check=True)
    faults, kept = child.stdout.split()
    assert int(faults) < 100  # of 4,000 pages
    assert kept == "x"


def blocks_taken(ahead: BlocksAhead, monkeypatch: pytest.MonkeyPatch, highest: int) -> list[tuple[int, int]]:
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(allocator, "take_pages", lambda address, size: taken.append((address, size)) or True)
    ahead.used(highest)
    return taken


def test_blocks_within_what_was_taken_at_first_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = BlocksAhead([(1000, 10)], num_blocks=500, num_backed=100)
    assert [blocks_taken(ahead, monkeypatch, highest) for highest in (0, 50, 99, 115)] == [[]] * 4


def test_a_growing_cache_is_backed_a_few_blocks_a_step_ahead_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = BlocksAhead([(1000, 10), (90000, 20)], num_blocks=500, num_backed=100)
    grown = 100 + BlocksAhead.GROWN
    assert blocks_taken(ahead, monkeypatch, grown) == [(1000 + 117 * 10, 20), (90000 + 117 * 20, 40)]
    for _ in range(40):
        blocks_taken(ahead, monkeypatch, grown)
    assert ahead.num_backed == 117 + BlocksAhead.AHEAD and not blocks_taken(ahead, monkeypatch, grown)
    assert blocks_taken(ahead, monkeypatch, grown + 1)[0] == (1000 + 149 * 10, 10)
    assert not blocks_taken(ahead, monkeypatch, grown + 1)


def test_blocks_end_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = BlocksAhead([(0, 10)], num_blocks=200, num_backed=100)
    for _ in range(20):
        blocks_taken(ahead, monkeypatch, 198)
    assert ahead.num_backed == 200 and not blocks_taken(ahead, monkeypatch, 199)

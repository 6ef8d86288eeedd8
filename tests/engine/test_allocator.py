"""Freed memory that stays: counted in page faults, in a child process, since the setting cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

"""Memory of a process tree: a child's counts, and it is gone when the child is."""

from __future__ import annotations

import os
import subprocess
import sys

from motet.benchmarks import process_tree

CHILD = """
import subprocess, sys
held = bytearray(b"x") * (48 << 20)
if sys.argv[1] == "outer":
    with subprocess.Popen([sys.executable, "-c", sys.stdin.readline().strip().encode().decode("unicode_escape"), "inner"],
                          stdin=subprocess.PIPE, stdout=sys.stdout) as inner:
        sys.stdin.readline()
        inner.stdin.close()
else:
    print("held", flush=True)
    sys.stdin.read()
"""


def test_memory_of_a_child_and_a_grandchild_counts_while_they_live() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "outer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as outer:
        assert outer.stdin is not None and outer.stdout is not None
        with process_tree.PssWatch(outer.pid, every_s=0.01) as watch:
            outer.stdin.write(CHILD.encode("unicode_escape").decode() + "\n")
            outer.stdin.flush()
            assert outer.stdout.readline() == "held\n"
            pids = process_tree.descendants(outer.pid)
            assert len(pids) == 2 and pids[0] == outer.pid
            assert process_tree.descendants(os.getpid())[0] == os.getpid()
            assert set(pids) <= set(process_tree.descendants(os.getpid()))
            assert all(process_tree.pss_bytes(pid) > 48 << 20 for pid in pids)
        outer.stdin.close()
    assert 96 << 20 < watch.most_bytes < 400 << 20
    assert watch.num_processes == 2 and watch.num_looks > 0
    assert process_tree.descendants(outer.pid) == [] and process_tree.pss_bytes(outer.pid) == 0

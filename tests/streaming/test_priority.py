"""The server's event loop gives way to the engine, and nothing else of the process does."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from motet.streaming import server


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_only_the_thread_that_steps_back_is_nicer() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: list[int] = []

    def loop() -> None:
        for _ in range(2):  # once more changes nothing
            server._step_back()
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert seen == [max(before, 10)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before

"""`motet serve` as a child process of a benchmark, started as a user starts it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Protocol

from motet.benchmarks import peer_worker
from motet.benchmarks.motet_engine import EngineError
from motet.deploy.demo import free_port, wait_ready
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError


class Served(Protocol):
    """What a server must know; the settings of the benchmarks have it."""

    @property
    def model(self) -> str: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def threads(self) -> int: ...


class Server:
    """`motet serve` as a user starts it; `wait` until it is ready. SIGTERM at the end."""

    def __init__(self, setting: Served, *, beside: Sequence[str] = ()) -> None:
        """`beside`: more models, in the same host."""
        self.port = free_port()
        self._log = tempfile.TemporaryFile()
        command = [
            sys.executable, "-m", "motet.deploy.cli", "serve", setting.model, *beside, "--port", str(self.port), "--preload",
            "--threads", str(setting.threads), "--dtype", setting.engine.dtype, "--weights", setting.engine.weights,
            "--device", "cpu",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Return once it takes requests. Raises EngineError with the server's last word when it does not."""
        try:
            wait_ready(self._process, f"http://127.0.0.1:{self.port}")
        except MotetError as error:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise EngineError(f"{error}: {said[-1][:200]}") from None

    def cpu_s(self) -> float:
        """CPU seconds of the HTTP process so far, without its engine's."""
        return peer_worker.process_cpu_s(self._process.pid)

"""Another engine as a child process: built if absent, spoken to in JSON lines (see peers/run_llamacpp.py), always ended.

Also reads CPU times of process groups from /proc, to show that whoever has no turn stays idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
_TICKS = os.sysconf("SC_CLK_TCK")


class PeerError(Exception):
    """A peer could not be built, started or measured; the message is for the row's `why`."""


def build(name: str, *, timeout_s: float = 2400.0, script: Path = PEERS / "build.sh") -> Path:
    """The peer's environment, made by build.sh unless it is there already. Raises PeerError."""
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                ["bash", str(script), name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{name} cannot be built: {error}") from None
        lines = done.stdout.decode().split()
        if done.returncode or not lines:
            raise PeerError(f"{name} cannot be built (status {done.returncode}): {_last_line(log)}")
    return Path(lines[-1])


class PeerWorker:
    """A worker that has said `ready`. Use as a context manager."""

    def __init__(self, command: Sequence[str | Path], *, start_timeout_s: float = 420.0) -> None:
        self._log = tempfile.TemporaryFile()
        self._buffer = b""
        self._process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.about: dict[str, Any] = self._read(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PeerWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Name, version and dtype."""
        return f"{self.about.get('name')} ({self.about.get('version')}), {self.about.get('dtype')}"

    def ask(self, command: dict[str, Any], *, timeout_s: float = 180.0) -> dict[str, Any]:
        """The answer to one command. Raises PeerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(self._ended()) from None
        answer = self._read(timeout_s)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def cpu_s(self) -> float:
        """CPU seconds of the worker and its children so far."""
        return group_cpu_s(self._process.pid)

    def close(self) -> None:
        """Ask it to quit, then see to it."""
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.write(b'{"cmd": "quit"}\n')
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        # Its children may outlive it: the whole session goes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._log.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """One line of JSON from the worker."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerError(f"the peer gave no answer within {timeout_s:.0f} s: {_last_line(self._log)}")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise PeerError(self._ended())
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"the peer said something that is no answer: {line[:200]!r}")
        return answer

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        return f"the peer ended (status {self._process.returncode}): {_last_line(self._log)}"


def group_cpu_s(group: int) -> float:
    """CPU seconds (user + system) of all living processes of a process group."""
    total = 0.0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == group:
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def process_cpu_s(pid: int) -> float:
    """CPU seconds (user + system) of one process; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before may hold anything)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _last_line(log: Any) -> str:
    """The last line of a log that says something, cut to 200 characters."""
    with contextlib.suppress(OSError, ValueError):
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            return str(lines[-1][:200])
    return "it said nothing"

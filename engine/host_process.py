"""The child process that holds an engine host: `python -m motet.engine.host_process FD`, started by ProcessClient.

FD is a connected Unix socket. The first frame is the HostConfig; then frames.ToHost comes in and frames.FromHost goes out.
The process ends when the socket does. Ctrl-C is the parent's business: it decides what is still to be finished.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import deque
from typing import BinaryIO, cast

import msgspec

from .allocator import keep_freed_memory
from .config import HostConfig
from .frames import Events, Progress, Reply, pack, read_frame, to_host_decoder
from .host import EngineHost
from .threads import prepare_threads
from .types import AnyEvent


class SocketPeer:
    """Writes to the parent without ever blocking the loop: what the socket does not take at once, a thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._more = threading.Event()
        threading.Thread(target=self._drain, name="motet-wire", daemon=True).start()

    def deliver(self, events: list[AnyEvent]) -> None:
        self._write(pack(Events(events)))

    def send(self, message: Reply | Progress) -> None:
        self._write(pack(message))

    def _write(self, data: bytes) -> None:
        with self._lock:
            if not self._backlog:
                try:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return  # the parent is gone; the reading thread sees that too
                if sent == len(data):
                    return
                data = data[sent:]
            self._backlog.append(data)
        self._more.set()

    def _drain(self) -> None:
        while True:
            self._more.wait()
            with self._lock:
                if not self._backlog:
                    self._more.clear()
                    continue
                data = self._backlog[0]
            try:
                self._socket.sendall(data)
            except OSError:
                return
            with self._lock:
                self._backlog.popleft()


def _pass_on(stream: BinaryIO, host: EngineHost, peer: SocketPeer) -> bool:
    """Wait for the parent's next message and post it. Holds none: some are large, and the next may come in hours."""
    try:
        body = read_frame(stream)
    except ConnectionResetError:  # the parent was killed with something still unread
        body = None
    if body is None:
        return False
    host.post(to_host_decoder.decode(body), peer)
    return host.alive  # else the parent sees the socket close, and restarts us


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent drains first, then closes the socket
    sock = socket.socket(fileno=int(sys.argv[1]))
    stream = cast(BinaryIO, sock.makefile("rb", buffering=1 << 16))
    first = read_frame(stream)
    if first is None:
        return
    config = msgspec.msgpack.decode(first, type=HostConfig)
    prepare_threads(config.threads)
    keep_freed_memory()
    from .load import build_engine

    host = EngineHost(config, build=build_engine)
    peer = SocketPeer(sock)
    sock.sendall(pack({"pid": os.getpid()}))
    host.start()
    while _pass_on(stream, host, peer):
        pass
    host.stop(timeout_s=2.0)
    # Daemon threads may sit in a long step or a load; nothing of theirs is worth waiting for.
    sys.stderr.flush()
    os._exit(0 if host.failure is None else 1)


if __name__ == "__main__":
    main()

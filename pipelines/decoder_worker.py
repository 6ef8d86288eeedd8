"""A process that reads files for another one: `python -m motet.pipelines.decoder_worker FD`. See decoder_process.py.

FD is a connected Unix stream socket. Each order on it is an `ORDER` of limits with two descriptors: a file with sound or a
picture, and a pipe for what is found. For each a child is forked that has the codecs in memory already, reads that one file
and ends, so that one file's reader never sees another's. A child may not write files, and its memory, processor time and time
are bounded: whatever a forged file makes of FFmpeg or Pillow ends there. The process ends when its socket does. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import BinaryIO, NoReturn

from ..engine.errors import InvalidRequest
from .media import DecodingStopped, Encoding, MediaLimits, decode_blocks, to_s16
from .picture_file import open_picture, prepare_opening

# max_input_bytes, max_seconds, max_pcm_bytes, whether 16 bits, processor seconds, seconds, bytes of memory; width and height
# that a picture shall have, 0 for sound
ORDER = struct.Struct("<QdQ?IdQII")
# On the pipe: a letter and a length, then PCM (or pixels), the JSON of a refusal, or nothing at the beginning and the end of
# the file.
FRAME = struct.Struct("<cI")
BEGUN, PCM, REFUSED, DONE = b"B", b"P", b"E", b"D"
PIECE = 1 << 18  # bytes of PCM that are collected before they are sent
_PIPE_BYTES = 1 << 20


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child ended: its pipe says it
    orders = socket.socket(fileno=int(sys.argv[1]))
    for_pictures = False  # a server of voices never needs Pillow
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, ORDER.size, 2)
        if len(order) < ORDER.size or len(descriptors) < 2:
            return
        if not for_pictures and ORDER.unpack(order)[-1]:
            prepare_opening()
            for_pictures = True
        if os.fork() == 0:
            orders.close()
            _serve(order, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _serve(order: bytes, source: int, out: int) -> NoReturn:
    """The child's life."""
    max_bytes, max_seconds, max_pcm, short, cpu_s, time_s, memory, width, height = ORDER.unpack(order)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody wants it any more
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, time_s)
    with open(out, "wb", buffering=0, closefd=False) as pipe:
        _send(pipe, BEGUN)
    confine(cpu_s=cpu_s, memory=memory)
    limits = MediaLimits(max_input_bytes=max_bytes, max_seconds=max_seconds, max_pcm_bytes=max_pcm)
    with open(out, "wb", buffering=0) as pipe, open(source, "rb") as file:
        os.lseek(source, 0, os.SEEK_SET)
        if width:
            _open(file, pipe, max_bytes, width, height)
        else:
            _decode(file, pipe, limits, "s16" if short else "f32")
    os._exit(0)


def confine(*, cpu_s: int, memory: int) -> None:
    """Limit this process: processor seconds, bytes of memory beyond what it has now; no files written, no cores dumped."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    with contextlib.suppress(OSError):  # elsewhere than on Linux there is no telling what it has
        with open("/proc/self/statm", encoding="ascii") as about:
            held = int(about.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + memory, held + memory))


def _decode(file: BinaryIO, pipe: BinaryIO, limits: MediaLimits, encoding: Encoding) -> None:
    """Send the sound of `file` in pieces, then how it ended."""
    reader_gone = select.poll()
    reader_gone.register(pipe.fileno(), 0)  # only errors: the other end was closed
    kept = bytearray()
    try:
        for block in decode_blocks(file, limits, encoding=encoding, stop=lambda: bool(reader_gone.poll(0))):
            kept += block.data.cast("B") if encoding == "f32" else to_s16(block)
            if len(kept) >= PIECE:
                _send(pipe, PCM, bytes(kept))
                kept.clear()
        if kept:
            _send(pipe, PCM, bytes(kept))
        _send(pipe, DONE)
    except DecodingStopped:
        pass
    except InvalidRequest as error:
        _send(pipe, REFUSED, json.dumps([error.message, error.code]).encode())


def _open(file: BinaryIO, pipe: BinaryIO, max_bytes: int, width: int, height: int) -> None:
    """Send the pixels of the picture in `file` in pieces, or why there are none."""
    try:
        pixels = open_picture(file.read(max_bytes + 1), width, height, max_bytes=max_bytes).tobytes()
    except InvalidRequest as error:
        _send(pipe, REFUSED, json.dumps([error.message, error.code]).encode())
        return
    for start in range(0, len(pixels), PIECE):
        _send(pipe, PCM, pixels[start : start + PIECE])
    _send(pipe, DONE)


def _send(pipe: BinaryIO, kind: bytes, data: bytes = b"") -> None:
    view = memoryview(FRAME.pack(kind, len(data)) + data)
    while view:
        view = view[pipe.write(view) :]


if __name__ == "__main__":
    main()

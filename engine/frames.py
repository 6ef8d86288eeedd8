"""Frames between processes: four bytes of length, then msgpack. Typed messages, no pickle. Torch-free."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO, TypeAlias

import msgspec

from .errors import ErrorInfo
from .types import AnyEvent, AnyRequest, EmbeddingSpan

_LENGTH = struct.Struct("<I")
MAX_FRAME = 512 * 2**20


class Submit(msgspec.Struct, tag="submit"):
    request: AnyRequest


class Append(msgspec.Struct, tag="append"):
    request_id: str
    token_ids: list[int]
    embeddings: list[EmbeddingSpan]
    last: bool
    pcm: bytes = b""


class Update(msgspec.Struct, tag="update"):
    request_id: str
    priority: int | None
    deadline: float | None


class Abort(msgspec.Struct, tag="abort"):
    request_id: str
    reason: str


class Call(msgspec.Struct, tag="call"):
    """A question to the host; answered by one `Reply` with the same `call_id`."""

    call_id: int
    verb: str  # load, stats, health, unload, stop
    arguments: dict[str, Any] = {}


class Events(msgspec.Struct, tag="events"):
    """All events of one step, together."""

    events: list[AnyEvent]


class Reply(msgspec.Struct, tag="reply"):
    call_id: int
    value: Any = None
    error: ErrorInfo | None = None


class Progress(msgspec.Struct, tag="progress"):
    """A line for people who wait: a model is being loaded."""

    model: str
    phase: str
    seconds: float


ToHost: TypeAlias = Submit | Append | Update | Abort | Call
FromHost: TypeAlias = Events | Reply | Progress

_encoder = msgspec.msgpack.Encoder()
to_host_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
from_host_decoder: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


def pack(message: Any) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"expected a frame of at most {MAX_FRAME} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame of a blocking stream, or None at its end (also in the middle of a frame)."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"expected a frame of at most {MAX_FRAME} bytes, got {length}")
    body = stream.read(length)
    return body if len(body) == length else None


class FrameReader:
    """Splits a byte stream that comes in arbitrary pieces into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies of all frames that `data` completes."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"expected a frame of at most {MAX_FRAME} bytes, got {length}")
            if len(self._buffer) - start - _LENGTH.size < length:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : start + _LENGTH.size + length]))
            start += _LENGTH.size + length
        del self._buffer[:start]
        return bodies

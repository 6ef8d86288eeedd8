"""The cheap HTTP client, against bytes as our server writes them, cut anywhere."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from motet.benchmarks import raw_stream
from motet.benchmarks.raw_stream import StreamError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(num_tokens: int) -> bytes:
    events = b"".join(chunk(b'data: {"choices":[{"text":"a"}]}\n\n') for _ in range(num_tokens))
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % num_tokens
    return HEAD + events + chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n"


@pytest.fixture
def serve() -> Iterator[Callable[[bytes, int], int]]:
    """Answer every connection with the same bytes, cut into pieces of a size; gives the port."""
    listeners = []

    def start(answer: bytes, size: int) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def talk(connection: socket.socket) -> None:
            with connection:
                connection.recv(1 << 16)
                for start in range(0, len(answer), size):
                    connection.sendall(answer[start : start + size])

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_streams_are_read_to_their_ends_however_they_are_cut(serve: Callable[[bytes, int], int], size: int) -> None:
    port = serve(stream(5), size)
    streams = raw_stream.read_streams(port, [raw_stream.post("/x", {})] * 3, timeout_s=20)
    assert (streams.num_tokens, streams.num_events) == (15, 18)
    with raw_stream.connect(port) as connection:
        assert 0 < raw_stream.first_text_s(connection, raw_stream.post("/x", {})) < 20


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", HEAD + chunk(b"data: {}\n\n"), b""]
)
def test_anything_but_a_stream_that_ends_well_is_an_error(serve: Callable[[bytes, int], int], answer: bytes) -> None:
    port = serve(answer, 1 << 20)
    with pytest.raises(StreamError):
        raw_stream.read_streams(port, [raw_stream.post("/x", {})], timeout_s=5)
    with raw_stream.connect(port) as connection, pytest.raises(StreamError):
        raw_stream.first_text_s(connection, raw_stream.post("/x", {}))

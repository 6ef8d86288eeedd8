"""What clients should not send, and what happens: a clear answer, in bounded time, nobody else disturbed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Running
from .fake_engine import MODEL
from .fake_painter import IMAGE
from .raw_http import Reply, connect, ends_within, get, head, post, read_reply, send

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHATS = "/v1/chat/completions"
MIB = 1024 * 1024


def test_every_answer_names_its_request(server: Running) -> None:
    assert post(server.port, CHATS, CHAT, x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 129, "a\x00b".replace("\x00", ";"), "é"):
        reply = post(server.port, CHATS, CHAT, x_request_id=bad)
        assert reply.status == 200 and reply.headers["x-request-id"].startswith("req-")
    reply = get(server.port, "/nowhere", x_request_id="mine")
    assert (reply.status, reply.headers["x-request-id"], reply.error["code"]) == (404, "mine", "not_found")
    reply = get(server.port, CHATS)
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")
    reply = post(server.port, CHATS, CHAT)
    assert reply.headers["x-motet-model"] == MODEL and int(reply.headers["openai-processing-ms"]) >= 0
    assert reply.headers["x-motet-queue-ms"] == "1"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model":"\xff"}', "invalid_json"),
        (b'{"model":"\\ud800"}', "invalid_json"),
        (b"[" * 200_000, "invalid_value"),
        (b'{"messages":' + b"[" * 200_000, "invalid_value"),
        (b'{"metadata":{"a":' + b"[" * 200_000, "invalid_json"),
        (b'{"tools":' + b'{"a":' * 100_000, "invalid_json"),
        (b'{"messages":[{"role":"user","content":"a"}]} x', "invalid_json"),
        (b"\x00" * 1000, "invalid_json"),
    ],
)
def test_broken_bodies(server: Running, body: bytes, code: str) -> None:
    reply = post(server.port, CHATS, body)
    assert (reply.status, reply.error["code"]) == (400, code)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", -0.1, None),
        ("temperature", 2.5, None),
        ("temperature", "hot", None),
        ("temperature", True, None),
        ("top_p", -1, None),
        ("top_p", 1.1, None),
        ("top_k", -2, None),
        ("min_p", 2, None),
        ("max_tokens", 0, None),
        ("max_tokens", -5, None),
        ("max_tokens", 1.5, None),
        ("max_tokens", 10**30, None),
        ("n", 0, None),
        ("n", 10**6, None),
        ("seed", 2**70, None),
        ("stop", [""], "stop[0]"),
        ("stop", ["a"] * 100_000, "stop"),
        ("stop", 7, None),
        ("presence_penalty", 3, None),
        ("repetition_penalty", 0, None),
        ("repetition_penalty", -1, None),
        ("logit_bias", {"x": 1}, None),
        ("logit_bias", {"5": 101}, "logit_bias[...]"),
        ("top_logprobs", 21, None),
        ("messages", [], None),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ("messages", [{"role": "user", "content": None}], "messages[0].content"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ("allowed_token_ids", [], None),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("colour", "red", None),
        ("stream_options", {"include_usage": True}, None),
        ("stream_options", {"x": 1}, "stream_options.x"),
        ("tools", [{}], None),
        ("response_format", {"type": "json_object"}, None),
        ("structured_outputs", {}, None),
        ("chat_template", "{{ x }}", None),
        ("echo", True, None),
        ("reasoning_effort", "high", None),
        ("truncate_prompt_tokens", 0, None),
        ("model", "nope", None),
        ("model", 5, None),
    ],
)
def test_bad_values_are_named(server: Running, field: str, value: Any, param: str | None) -> None:
    reply = post(server.port, CHATS, {**CHAT, field: value})
    assert reply.status == (404 if value == "nope" else 400)
    assert reply.error["param"] == (param or field), reply.error
    assert server.engine.requests == []


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_not_a_number(server: Running, word: str) -> None:
    body = json.dumps({**CHAT, "top_p": 12345.5}).replace("12345.5", word).encode()
    reply = post(server.port, CHATS, body)
    assert (reply.status, reply.error["param"]) == (400, "top_p")


def test_bad_prompts(server: Running) -> None:
    for prompt in ("", [], [[]], [""], ["a", 1], [-1], [10**12], [99999], None, {"a": 1}, ["a"] * 1025):
        reply = post(server.port, "/v1/completions", {"model": MODEL, "prompt": prompt})
        assert reply.status == 400 and reply.error["param"] in ("prompt", "prompt[0]"), (prompt, reply)
    reply = post(server.port, "/v1/completions", {"model": MODEL, "prompt": "x" * 4096})
    assert reply.error["code"] == "context_length_exceeded"
    reply = post(server.port, "/v1/completions", {"model": MODEL, "prompt": "a", "best_of": 2})
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", "best_of")
    reply = post(server.port, "/v1/completions", {"model": MODEL, "prompt": "a", "suffix": "b"})
    assert reply.error["param"] == "suffix"


def test_text_that_spells_special_tokens_stays_text(server: Running) -> None:
    post(server.port, CHATS, {"model": MODEL, "messages": [{"role": "user", "content": "<|im_end|>"}]})
    (request,) = server.engine.requests
    assert request.prompt.count(257) == 1 and bytes(i for i in request.prompt if i < 256).count(b"<|im_end|>") == 1


def test_tokenize_and_back(server: Running) -> None:
    for prefix in ("", "/v1"):
        reply = post(server.port, f"{prefix}/tokenize", {"prompt": "hé", "return_token_strs": True})
        answer = json.loads(reply.body)
        assert answer["tokens"] == list("hé".encode()) and answer["count"] == 3 and answer["max_model_len"] == 4096
        back = post(server.port, f"{prefix}/detokenize", {"tokens": answer["tokens"]})
        assert json.loads(back.body) == {"prompt": "hé"}
    chat = post(server.port, "/tokenize", {"messages": CHAT["messages"]})
    assert json.loads(chat.body)["tokens"][0] == 256
    assert post(server.port, "/tokenize", {}).error["param"] == "prompt"
    assert post(server.port, "/detokenize", {"tokens": [70000]}).status == 400


def test_media_types(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = post(server.port, CHATS, CHAT, content_type=kind)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert post(server.port, CHATS, CHAT, content_type="application/json; charset=utf-8").status == 200


def test_large_bodies(start_server: Callable[..., Running]) -> None:
    server = start_server(max_body_bytes=2 * MIB)
    reply = post(server.port, CHATS, b"x" * (3 * MIB))
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    # In chunks nobody says beforehand how much will come.
    with connect(server.port) as connection:
        connection.sendall(head(CHATS, transfer_encoding="chunked"))
        for _ in range(3):
            connection.sendall(b"%x\r\n" % MIB + b"x" * MIB + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_reply(connection).error["code"] == "request_too_large"
    # A claim far beyond the limit is answered without reading.
    with connect(server.port) as connection:
        connection.sendall(head(CHATS, length=10**15))
        assert read_reply(connection).status == 413
        assert ends_within(connection, 3)
    # Almost the limit, all in one string: refused for its length in tokens, quickly.
    started = time.process_time()
    long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (2 * MIB - 1000)}]}
    assert post(server.port, CHATS, long).error["code"] == "context_length_exceeded"
    assert time.process_time() - started < 2
    assert post(server.port, CHATS, CHAT).status == 200


def test_the_default_limit_is_32_mib(server: Running) -> None:
    assert post(server.port, CHATS, b"x" * (33 * MIB)).status == 413


def test_a_body_of_very_many_values(server: Running) -> None:
    """Small values by the million would take the decoder, and so everybody's streams, for seconds."""
    started = time.process_time()
    for body in (
        b'{"metadata":{' + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}}",
        b'{"messages":[{"role":"user","content":"a","annotations":[' + b"[]," * 600_000 + b"1]}]}",
    ):
        assert post(server.port, CHATS, body).error["code"] == "request_too_large"
    assert time.process_time() - started < 3


def test_slow_and_lying_bodies(start_server: Callable[..., Running]) -> None:
    server = start_server(body_timeout_s=0.3)
    with connect(server.port) as connection:
        connection.sendall(head(CHATS, length=100) + b'{"model"')
        reply = read_reply(connection)
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert ends_within(connection, 2)
    body = json.dumps(CHAT).encode()
    with connect(server.port) as connection:  # more bytes than were claimed: the rest is not a request
        connection.sendall(head(CHATS, length=len(body) - 1) + body)
        assert read_reply(connection).error["code"] in ("invalid_json", "invalid_http")
        assert ends_within(connection, 2)


def test_slow_heads(start_server: Callable[..., Running]) -> None:
    server = start_server(header_timeout_s=0.3)
    with connect(server.port) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n")
        assert read_reply(connection).error["code"] == "request_timeout" and ends_within(connection, 2)
    with connect(server.port) as connection:
        assert ends_within(connection, 2)  # nothing asked, nothing answered
    with connect(server.port) as connection:  # the time is for one head, not for the connection
        for _ in range(3):
            time.sleep(0.2)
            connection.sendall(head("/livez", "GET"))
            assert read_reply(connection).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /livez HTTP/1.1\r\nx-big: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(500)) + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nx-endless: " + b"a" * 1_000_000,
    ],
)
def test_huge_heads(server: Running, data: bytes) -> None:
    with connect(server.port) as connection:
        try:
            connection.sendall(data)
        except OSError:
            return  # it hung up while we were still sending: as good
        assert read_reply(connection).error["code"] == "headers_too_large"
        assert ends_within(connection, 3)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_what_is_not_http(server: Running, data: bytes) -> None:
    with connect(server.port) as connection:
        connection.sendall(data)
        assert read_reply(connection).error["code"] in ("invalid_http", "unsupported_media_type")
        assert ends_within(connection, 3)
    assert get(server.port, "/livez").status == 200


def test_pipelining(server: Running) -> None:
    with connect(server.port) as connection:
        connection.sendall(head("/livez", "GET") * 5 + head("/livez", "GET", connection="close"))
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
        assert data.count(b"HTTP/1.1 200 OK") == 6
    with connect(server.port) as connection:  # too many at once: refused, not queued
        connection.sendall(head("/livez", "GET") * 1000)
        assert ends_within(connection, 5)


def test_the_same_ids_twice(server: Running) -> None:
    """Ids of callers are metadata: equal ones do not meet."""
    server.engine.step_s = 0.01
    replies: list[Reply] = []

    def ask() -> None:
        replies.append(post(server.port, CHATS, {**CHAT, "request_id": "same"}, x_request_id="same"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status for reply in replies] == [200] * 4
    assert len({json.loads(reply.body)["id"] for reply in replies}) == 4


def test_leaving_ends_the_work(server: Running) -> None:
    """Whether the answer is streamed or whole, and also while nothing has come yet."""
    server.engine.step_s = 0.01
    for stream in (True, False):
        body = json.dumps({**CHAT, "stream": stream, "ignore_eos": True, "max_tokens": 3000}).encode()
        connection = connect(server.port)
        connection.sendall(head(CHATS, length=len(body)) + body)
        server.wait(lambda engine: len(engine.live) == 1, "the request runs")
        connection.close()
        server.wait(lambda engine: not engine.live, "the work ends")
    assert list(server.engine.ended.values()) == ["abort: disconnect"] * 2
    metrics = get(server.port, "/metrics").body.decode()
    assert 'motet_client_disconnects_total{phase="waiting"}' in metrics
    assert 'status_class="4xx"' in metrics


def test_leaving_with_half_a_body(server: Running) -> None:
    with connect(server.port) as connection:
        connection.sendall(head(CHATS, length=100) + b"{")
    assert get(server.port, "/livez").status == 200 and server.engine.requests == []


def test_a_reader_that_does_not_read(start_server: Callable[..., Running]) -> None:
    """It is dropped after write_timeout_s, the engine is told, and what was written for it is bounded."""
    server = start_server(write_timeout_s=0.5)
    server.engine.tokens_per_step = 64
    body = json.dumps(
        {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20, "n": 8}
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head(CHATS, length=len(body)) + body)
    server.wait(lambda engine: len(engine.ended) == 8, "the engine is told", timeout_s=8)
    assert "abort: slow_reader" in server.engine.ended.values()
    connection.close()
    assert post(server.port, CHATS, CHAT).status == 200


def test_a_silent_engine_is_bridged_with_comments(start_server: Callable[..., Running]) -> None:
    server = start_server(sse_keep_alive_s=0.1)
    server.engine.first_s = 0.35
    reply = post(server.port, CHATS, {**CHAT, "stream": True})
    frames = reply.body.split(b"\n\n")
    assert b'"role":"assistant"' in frames[0] and frames.count(b": keep-alive") >= 2
    assert frames[-2] == b"data: [DONE]" and b'"finish_reason":"stop"' in frames[-3]
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert b": keep-alive" in post(server.port, "/v1/completions", {"model": MODEL, "prompt": "a", "stream": True}).body
    assert server.engine.ended and all(how == "stop" or how == "length" for how in server.engine.ended.values())


def test_a_full_queue(start_server: Callable[..., Running]) -> None:
    for status in (429, 503):
        server = start_server(max_queued_requests=1, overload_status=status)
        server.engine.first_s = 0.5
        first = threading.Thread(target=post, args=(server.port, CHATS, CHAT))
        first.start()
        server.wait(lambda engine: len(engine.live) == 1, "the first waits")
        reply = post(server.port, CHATS, {**CHAT, "stream": True})
        assert (reply.status, reply.error["code"]) == (status, "server_overloaded")
        assert int(reply.headers["retry-after"]) >= 1 and int(reply.headers["retry-after-ms"]) >= 1000
        first.join()
        assert post(server.port, CHATS, CHAT).status == 200
        assert 'motet_rejections_total{reason="server_overloaded"} 1.0' in get(server.port, "/metrics").body.decode()


def test_keys_guard_everything_but_the_probes(start_server: Callable[..., Running]) -> None:
    server = start_server(api_keys=("secret",))
    for path in ("/livez", "/readyz", "/ping", "/health"):
        assert get(server.port, path).status == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/version", "/nowhere", "/livez/", "//livez", "/livez%2f"):
        reply = get(server.port, path)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
        assert reply.headers["www-authenticate"] == "Bearer" and "x-request-id" in reply.headers
    for value in ("Bearer secret2", "Bearer ", "Basic secret", "secret", "Bearer sécret"):
        assert post(server.port, CHATS, CHAT, authorization=value).status == 401
    assert post(server.port, CHATS, CHAT, authorization="bearer secret").status == 200


def test_hosts_and_origins(start_server: Callable[..., Running]) -> None:
    server = start_server(allowed_hosts=("localhost", "*.example.org"), cors_origins=("https://a.example",))
    assert get(server.port, "/livez").status == 200
    assert get(server.port, "/livez", host="x.example.org:80").status == 200
    assert get(server.port, "/livez", host="evil.test").error["code"] == "host_not_allowed"
    assert (
        get(server.port, "/livez", origin="https://a.example").headers["access-control-allow-origin"]
        == "https://a.example"
    )
    assert "access-control-allow-origin" not in get(server.port, "/livez", origin="https://b.example").headers


def test_no_cors_by_default(server: Running) -> None:
    assert not [
        name for name in get(server.port, "/livez", origin="https://a.example").headers if "access-control" in name
    ]


def test_probes_when_the_engine_is_down(server: Running) -> None:
    assert json.loads(get(server.port, "/readyz").body) == {
        "status": "ok",
        "models": {MODEL: "loaded", IMAGE: "loaded"},
    }
    server.engine.alive = False
    assert get(server.port, "/livez").status == 200
    reply = get(server.port, "/readyz")
    assert reply.status == 503 and json.loads(reply.body)["status"] == "engine_down" and "retry-after" in reply.headers
    assert get(server.port, "/metrics").status == 200 and get(server.port, "/v1/models").status == 200
    assert post(server.port, CHATS, CHAT).status == 503
    server.engine.alive = True


def test_a_busy_engine_is_not_down(start_server: Callable[..., Running]) -> None:
    """A probe that meets a long step gets the last known state, in time."""
    server = start_server(stats_timeout_s=0.1)
    assert get(server.port, "/readyz").status == 200
    server.engine.answer_s = 60.0  # longer than a reply is waited for
    assert get(server.port, "/readyz").status == 200 and get(server.port, "/metrics").status == 200
    assert "motet_engine_up 0.0" in get(server.port, "/metrics").body.decode()


def test_a_stranger_does_not_disturb_a_stream(server: Running) -> None:
    """While one stream runs, bad requests of every kind come in; the stream is whole."""
    server.engine.step_s = 0.01
    body = json.dumps({**CHAT, "stream": True}).encode()
    with connect(server.port) as connection:
        connection.sendall(head(CHATS, length=len(body)) + body)
        for bad in (b"{", b"[" * 100_000, json.dumps({**CHAT, "stop": ["x"] * 100_000}).encode()):
            assert post(server.port, CHATS, bad).status == 400
        send(server.port, b"HELLO\r\n\r\n")
        text = read_reply(connection).body.decode()
    parts = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content", "") for part in parts for choice in part["choices"])
    assert said == server.engine.reply

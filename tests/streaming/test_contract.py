"""What the server says about itself: errors, OpenAPI, metrics, configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from motet.engine import errors
from motet.engine.metrics import VLLM_NAMES, Metrics
from motet.streaming import protocol
from motet.streaming.app import create_app, operations
from motet.streaming.auth import KeyRing
from motet.streaming.config import ServedModel, ServerConfig
from motet.streaming.openapi import document

from .conftest import Running
from .fake_engine import MODEL
from .raw_http import get, post


def test_every_error_has_a_place_on_the_wire() -> None:
    for cls in errors._KINDS.values():
        wire = protocol.wire_error(cls("said", param="p"))
        body = json.loads(wire.body)["error"]
        assert body["message"] == "said" and body["param"] == "p" and body["code"] == cls.code
        assert 400 <= wire.status < 600 and (wire.status != 500 or cls is errors.InternalError)


def test_foreign_errors_tell_nothing() -> None:
    wire = protocol.wire_error(ValueError("/etc/secret at 0x7f"))
    assert wire.status == 500 and b"secret" not in wire.body and b"0x7f" not in wire.body


def test_retry_after() -> None:
    for error in (errors.Overloaded("x", retry_after_s=0.2), errors.Unavailable("x", retry_after_s=1.5)):
        headers = dict(protocol.wire_error(error).headers)
        assert int(headers[b"retry-after"]) * 1000 >= int(headers[b"retry-after-ms"]) > 0
    assert protocol.wire_error(errors.Overloaded("x"), overload_status=503).status == 503


def test_openapi_is_true_to_the_routes(server: Running) -> None:
    api = json.loads(get(server.port, "/openapi.json").body)
    assert api["openapi"].startswith("3.1")
    listed = {(method.upper(), path) for path, item in api["paths"].items() for method in item}
    app = create_app(None, ServerConfig())
    routed = {
        (method, re.sub(r":path}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert listed == routed - {("GET", "/openapi.json")}
    ids = [operation["operationId"] for item in api["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))
    _check_refs(api, api)


def _check_refs(value: Any, api: dict[str, Any]) -> None:
    if isinstance(value, dict):
        if isinstance(ref := value.get("$ref"), str):
            assert ref.rsplit("/", 1)[1] in api["components"]["schemas"]
        for item in value.values():
            _check_refs(item, api)
    elif isinstance(value, list):
        for item in value:
            _check_refs(item, api)


def test_openapi_asks_for_keys_where_the_server_does() -> None:
    api = document(operations(), title="t", version="1", secured=True)
    open_paths = {path for path, item in api["paths"].items() if all("security" not in it for it in item.values())}
    assert open_paths == {"/livez", "/readyz", "/health", "/ping"}


def test_answers_are_what_openapi_promises(server: Running) -> None:
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "prompt_logprobs": 1,
    }
    answer = msgspec.json.decode(post(server.port, "/v1/chat/completions", chat).body, type=protocol.ChatCompletion)
    assert answer.prompt_logprobs is not msgspec.UNSET and answer.prompt_logprobs[0] is None
    body = post(server.port, "/v1/chat/completions", {**chat, "stream": True}).body
    chunks = [msgspec.json.decode(frame[6:], type=protocol.ChatChunk) for frame in body.split(b"\n\n")[:-2]]
    ids = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.token_ids is not msgspec.UNSET
        for token in choice.token_ids
    ]
    assert ids == answer.choices[0].token_ids
    plain = {"prompt": "ab", "logprobs": 1, "echo": True, "stream": True, "return_token_ids": True}
    body = post(server.port, "/v1/completions", plain).body
    parts = [msgspec.json.decode(frame[6:], type=protocol.Completion) for frame in body.split(b"\n\n")[:-2]]
    assert "".join(choice.text for part in parts for choice in part.choices).startswith("abHello")


def test_plain_chunks_are_the_struct_s_bytes(server: Running) -> None:
    """The bytes put together by hand say exactly what the typed chunk would."""
    asks = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, protocol.ChatChunk),
        ("/v1/completions", {"prompt": "ab"}, protocol.Completion),
    ]
    for path, ask, kind in asks:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            for frame in post(server.port, path, {**ask, "stream": True, **options}).body.split(b"\n\n")[:-2]:
                chunk = msgspec.json.decode(frame[6:], type=kind)
                again, given = msgspec.json.decode(msgspec.json.encode(chunk)), json.loads(frame[6:])
                again.pop("system_fingerprint", None)
                given.pop("system_fingerprint", None)
                assert again == given
                assert ("usage" in given) == bool(options)


def test_metrics_of_one_request(server: Running) -> None:
    post(server.port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})
    get(server.port, "/no/such/path")
    reply = get(server.port, "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = reply.body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits",
        "vllm:e2e_request_latency_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:request_success",
        "motet_http_requests",
    ):
        assert name in families, name
    assert f'vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.25' in text
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}}' in text
    assert 'route="other"' in text and "/no/such" not in text
    assert 'finished_reason="length"' in text and "motet_engine_up 1.0" in text
    assert "_created" not in text


def test_every_alias_stands_for_a_metric() -> None:
    metrics = Metrics()
    steps = {"buckets": [[1, 2], ["+Inf", 3]], "sum": 9}
    metrics.set_engine_stats({"models": {"m": {"step_tokens": steps, "num_blocks": 1}}})
    for name in ("observe_rejected", "observe_disconnect"):
        getattr(metrics, name)("x")
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    for ours, theirs in VLLM_NAMES.items():
        assert {ours, *theirs} <= names, ours


def test_configuration_is_checked() -> None:
    for bad in (
        {"max_body_bytes": 0},
        {"port": 70000},
        {"cors_origins": ("*",)},
        {"write_timeout_s": -1.0},
        {"models": (ServedModel(id="a"), ServedModel(id="a"))},
        {"models": (ServedModel(id="default"),)},
    ):
        with pytest.raises(ValueError, match="must|origins|different|called"):
            ServerConfig(**bad)  # type: ignore[arg-type]
    assert "hunter2" not in repr(ServerConfig(api_keys=("hunter2",)))


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\nsha256:" + __import__("hashlib").sha256(b"beta").hexdigest() + "\n")
    ring = KeyRing((), file)
    assert ring.accepts("alpha") and ring.accepts("beta") and not ring.accepts("gamma") and not ring.accepts("")
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no API key"):
        KeyRing((), file)
    for bad in ("", " ", "sha256:12"):
        with pytest.raises(ValueError, match="API key"):
            KeyRing((bad,))
    assert not KeyRing()

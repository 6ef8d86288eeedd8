"""The public `openai` client against our server: types, streams, errors, retries."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from motet.engine.errors import Overloaded

from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_painter import IMAGE
from .fake_voice import TTS

CHAT = [{"role": "user", "content": "hi"}]
REPLY = "Hello, wörld! 🎉"


def test_a_chat(server: Running) -> None:
    answer = server.client(_strict_response_validation=True).chat.completions.create(model=MODEL, messages=CHAT)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.role == "assistant"
    assert answer.model == MODEL and answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(prompt) - 2 * len("<|im_start|>") - len("<|im_end|>") + 3
    assert answer.usage is not None and answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == len(REPLY.encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_equals_the_whole(server: Running, n: int) -> None:
    stream = server.client(_strict_response_validation=True).chat.completions.create(
        model="default", messages=CHAT, stream=True, n=n, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == n * len(REPLY.encode())
    for index in range(n):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "stop"
        assert "".join(choice.delta.content or "" for choice in mine) == REPLY
        assert all(choice.finish_reason is None for choice in mine[:-1])


def test_stop_strings_length_and_ids(server: Running) -> None:
    client = server.client()
    cut = client.chat.completions.create(model=MODEL, messages=CHAT, stop=["wör"])
    assert cut.choices[0].message.content == "Hello, " and cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == "wör"  # type: ignore[attr-defined]
    short = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=5, extra_body={"return_token_ids": True}
    )
    assert short.choices[0].message.content == "Hello" and short.choices[0].finish_reason == "length"
    assert short.choices[0].token_ids == list(b"Hello")  # type: ignore[attr-defined]
    assert short.prompt_token_ids[0] == 256  # type: ignore[attr-defined]


def test_parameters_reach_the_engine(server: Running) -> None:
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "min_tokens": 2,
        "priority": -3,
        "stop_token_ids": [33],
        "allowed_token_ids": [5, 6, 7, 9],
        "penalty_window": 64,
        "request_id": "theirs",
        "cache_salt": "x",
    }
    server.client().chat.completions.create(
        model=MODEL,
        messages=CHAT,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=-1,
        max_tokens=4,
        logit_bias={"65": 5.0},
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        extra_body=extra,
    )
    (request,) = server.engine.requests
    params = request.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.logit_bias == {65: 5.0} and params.seed is not None and 0 <= params.seed < 2**62
    assert params.ignore_eos and params.min_tokens == 2 and params.max_tokens == 4 and params.penalty_window == 64
    assert params.stop_token_ids == (33,) and params.allowed is not None
    assert params.allowed.at(0) == params.allowed.at(9) == ((5, 8), (9, 10))
    assert request.priority == -3 and request.cache_salt == "" and "theirs" not in request.request_id


def test_chat_logprobs(server: Running) -> None:
    for stream in (False, True):
        answer = server.client().chat.completions.create(
            model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=2, stream=stream
        )
        chunks = list(answer) if stream else [answer]  # type: ignore[call-overload]
        entries = [
            entry
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]
        assert [entry.token for entry in entries] == ["H", "e"]
        assert entries[0].bytes == [72] and [top.token for top in entries[0].top_logprobs] == ["H", "I"]


def test_completions(server: Running) -> None:
    client = server.client(_strict_response_validation=True)
    answer = client.completions.create(model=MODEL, prompt="ab", max_tokens=5)
    assert answer.choices[0].text == "Hello" and answer.object == "text_completion"
    many = client.completions.create(model=MODEL, prompt=["a", "bb"], n=2, max_tokens=3)
    assert [(choice.index, choice.text) for choice in many.choices] == [(i, "Hel") for i in range(4)]
    assert many.usage is not None and (many.usage.prompt_tokens, many.usage.completion_tokens) == (3, 12)
    assert client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=1).choices[0].text == "H"
    ids = client.completions.create(model=MODEL, prompt=[[97], [98, 99]], max_tokens=1)
    assert ids.usage is not None and ids.usage.prompt_tokens == 3


def test_echo_and_prompt_scores(server: Running) -> None:
    """What lm-evaluation asks for: the prompt back with its log probabilities, no answer."""
    client = server.client()
    scored = client.completions.create(model=MODEL, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    (choice,) = scored.choices
    assert choice.text == "abc" and choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"] and choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.top_logprobs == [None, {"b": -0.5}, {"c": -0.5}]
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    stream = client.completions.create(
        model=MODEL, prompt=["abc", "x"], max_tokens=2, echo=True, logprobs=0, stream=True
    )
    texts, tokens = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in stream:
        for part in chunk.choices:
            texts[part.index] += part.text
            if part.logprobs is not None:
                tokens[part.index] += part.logprobs.tokens or []
    assert texts == ["abcHe", "xHe"] and tokens == [["a", "b", "c", "H", "e"], ["x", "H", "e"]]


def test_models(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL, ASR, TTS, IMAGE]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("a/b")
    assert caught.value.code == "model_not_found"


def test_errors_are_typed(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.param == "model" and missing.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool])  # type: ignore[list-item]
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    assert server.engine.requests == []


def test_an_error_before_the_first_token_has_its_status(server: Running) -> None:
    server.engine.submit_error = Overloaded("no room", retry_after_s=3)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            server.client().chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
        assert caught.value.code == "server_overloaded" and caught.value.response.headers["retry-after"] == "3"


def test_an_error_in_mid_stream_is_raised_by_the_client(server: Running) -> None:
    server.engine.fail_after = 3
    stream = server.client().chat.completions.create(model=MODEL, messages=CHAT, stream=True)
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "Hel" and caught.value.code == "engine_dead"


def test_the_client_retries_when_told_to(server: Running) -> None:
    server.engine.submit_error = Overloaded("no room", retry_after_s=0.05)
    server.engine.refuse_first = 2
    answer = server.client(max_retries=2).chat.completions.create(model=MODEL, messages=CHAT)
    assert answer.choices[0].message.content == REPLY and len(server.engine.requests) == 3


def test_keys(start_server: Callable[..., Running]) -> None:
    server = start_server(api_keys=("secret", "sha256:" + "0" * 64))
    with pytest.raises(openai.AuthenticationError) as caught:
        server.client(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert server.client(api_key="secret").models.list().data
    for header in ("x-api-key", "api-key"):
        client = server.client(default_headers={header: "secret"})
        assert client.models.list().data


def test_leaving_a_stream_ends_the_request(server: Running) -> None:
    server.engine.step_s = 0.005
    stream = server.client().chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait(lambda engine: not engine.live and len(engine.ended) == 1, "the engine is told")
    assert list(server.engine.ended.values()) == ["abort: disconnect"]

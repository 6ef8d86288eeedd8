"""`Chat` from a user's side: whole, streamed, async, many, left early, refused. A scripted client is the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from motet import Chat
from motet.engine.config import HostConfig
from motet.engine.errors import ContextLengthExceeded, ErrorInfo, InternalError, InvalidRequest, ModelNotFound
from motet.engine.types import SamplingParams
from motet.pipelines.hub import Hub

from .scripted_client import MODEL, ScriptedClient

TEXT = "Hello, wörld! 🎵"


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient(TEXT)


@pytest.fixture
def chat(client: ScriptedClient) -> Iterator[Chat]:
    with Hub(HostConfig(), client=client) as hub:
        yield Chat(MODEL, hub=hub)


def wait_until(true: object, *, timeout_s: float = 5.0) -> None:
    assert callable(true)
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_one_prompt(chat: Chat, client: ScriptedClient) -> None:
    result = chat("Why is the sky blue?", temperature=0, max_tokens=50)
    assert result.text == str(result) == TEXT
    assert result.finish_reason == "stop"
    assert result.usage.num_output_tokens == len(result.token_ids) == len(client.tokenizer.encode(TEXT))
    assert result.timing.ttft_s == 0.5
    assert result.timing.tokens_per_s == pytest.approx(result.usage.num_output_tokens - 1)
    assert client.requests[0].params.temperature == 0


def test_messages_and_system(chat: Chat, client: ScriptedClient) -> None:
    chat("Hi.", system="Be brief.")
    chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}])
    assert client.requests[0].prompt == client.requests[1].prompt
    assert "Be brief." in client.tokenizer.decode(client.requests[0].prompt)


def test_many_prompts_run_together_and_come_back_in_order(client: ScriptedClient) -> None:
    client.together = 20  # one after another, the first would never answer
    with Hub(HostConfig(), client=client) as hub:
        results = Chat(MODEL, hub=hub)([f"Question {i}" for i in range(20)], max_tokens=3)
    assert [result.text for result in results] == [results[0].text] * 20
    assert client.most_running == 20
    asked = [client.tokenizer.decode(request.prompt) for request in client.requests]
    assert all(f"Question {i}" in prompt for i, prompt in enumerate(asked))


def test_many_conversations_and_none(chat: Chat) -> None:
    assert len(chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])) == 2
    assert chat([]) == []


def test_a_stream_gives_the_same_text_and_then_the_result(client: ScriptedClient, chat: Chat) -> None:
    client.delay_s = 0.05  # so that the end cannot have come before it is asked for
    stream = chat.stream("Hi.")
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.result
    assert "".join(stream) == TEXT
    assert stream.result.text == TEXT
    assert list(stream) == []


def test_a_slow_reader_gets_larger_pieces(chat: Chat) -> None:
    stream = chat.stream("Hi.")
    time.sleep(0.3)
    assert list(stream) == [TEXT]


def test_leaving_a_stream_ends_the_request(client: ScriptedClient) -> None:
    client.delay_s = 0.05
    with Hub(HostConfig(), client=client) as hub:
        with Chat(MODEL, hub=hub).stream("Hi.") as stream:
            next(stream)
        wait_until(lambda: client.num_running == 0)
        assert "".join(stream) != TEXT


def test_async_twins() -> None:
    async def main() -> None:
        hub = Hub(HostConfig(), client=ScriptedClient(TEXT))
        async with Chat(MODEL, hub=hub) as chat:
            assert (await chat.call_async("Hi.")).text == TEXT
            assert len(await chat.call_async(["a", "b"])) == 2
            stream = chat.stream_async("Hi.")
            pieces = [piece async for piece in stream]
            assert "".join(pieces) == stream.result.text == TEXT
        hub.close()

    asyncio.run(main())


def test_leaving_async_work_ends_the_request(client: ScriptedClient) -> None:
    client.delay_s = 0.05

    async def main(chat: Chat) -> None:
        async with chat.stream_async("Hi.") as stream:
            async for _ in stream:
                break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.08):
                await chat.call_async(["a", "b", "c"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.08):
                async for _ in chat.stream_async("Hi."):
                    pass

    with Hub(HostConfig(), client=client) as hub:
        asyncio.run(main(Chat(MODEL, hub=hub)))
        wait_until(lambda: client.num_running == 0)
        assert len(client.ended) == 5


def test_several_threads_share_one_chat(chat: Chat) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(chat("Hi.").text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert texts == [TEXT] * 8


def test_params_and_keywords(chat: Chat, client: ScriptedClient) -> None:
    chat("Hi.", params=SamplingParams(temperature=0.3, top_k=7), top_k=9, seed=5)
    params = client.requests[0].params
    assert (params.temperature, params.top_k, params.seed) == (0.3, 9, 5)


def test_stop_text(chat: Chat) -> None:
    result = chat("Hi.", stop="wörld")
    assert result.text == "Hello, "
    assert (result.finish_reason, result.stop_reason) == ("stop", "wörld")


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("Hi.", {"temprature": 1}, "did you mean 'temperature'"),
        ("Hi.", {"max_tokens": -1}, "max_tokens"),
        (3, {}, "a prompt is a text or a list of messages"),
        ([3], {}, "a prompt is a text or a list of messages"),
        ([{"role": "system", "content": "x"}], {"system": "y"}, "already begin"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    chat: Chat, client: ScriptedClient, prompt: object, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        chat(prompt, **options)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest):
        chat.stream(prompt, **options)  # type: ignore[arg-type]
    assert client.requests == []


def test_a_prompt_that_does_not_fit_raises_before_the_first_piece(chat: Chat) -> None:
    with pytest.raises(ContextLengthExceeded):
        chat.stream("word " * 600)


def test_an_unknown_model_is_refused_at_once(client: ScriptedClient) -> None:
    with Hub(HostConfig(), client=client) as hub, pytest.raises(ModelNotFound):
        Chat("nonsense", hub=hub)


def test_a_failure_in_the_middle_is_raised_after_its_text(client: ScriptedClient) -> None:
    client.fail = ErrorInfo(kind="InternalError", message="it broke", code="internal_error")
    with Hub(HostConfig(), client=client) as hub:
        chat = Chat(MODEL, hub=hub)
        pieces: list[str] = []
        with pytest.raises(InternalError, match="it broke"):
            pieces.extend(chat.stream("Hi."))
        with pytest.raises(InternalError, match="it broke"):
            chat(["a", "b"])

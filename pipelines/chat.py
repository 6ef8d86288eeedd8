"""Chat: a prompt or a conversation in, an answer out; whole or streamed, sync or async, one or many.

    from motet import Chat

    with Chat("smollm2-135m-instruct") as chat:
        print(chat("Why is the sky blue?", max_tokens=64))
        for piece in (stream := chat.stream("Tell me a story.")):
            print(piece, end="", flush=True)
        print(stream.result.usage)
        answers = chat(["One prompt.", "Another one."])      # decoded together, in order

A prompt is a text (one user message) or a list of messages `{"role": ..., "content": ...}`; a list of prompts gives a
list of results. Keywords are those of `ChatOptions`. Errors are those of engine/errors.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Unpack, cast, overload

import msgspec

from ..engine.config import EngineConfig
from ..engine.errors import InvalidRequest, Unavailable, from_info
from ..engine.frontend.events import TextAborted, TextDelta, TextDone, TextFailed, TextLogprob, TextRequest
from ..engine.types import SamplingParams
from .collected import AsyncCollectedStream, Collected, CollectedStream
from .hub import Hub
from .pipeline import Pipeline, together
from .types import ChatOptions, ChatResult, ChatTiming, Message, Prompt, Prompts

# Requests of one call that are with the engine at a time: enough to fill its batch, few enough for its queue.
NUM_TOGETHER = 128


class Chat(Pipeline):
    """A chat model. Calls may come from several threads and loops at once; they are batched together."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineConfig | None = None,
        threads: int = 0,
        hub: Hub | None = None,
    ) -> None:
        """Load `model` (None: the first installed chat model); blocks until it can answer.

        Pass `hub` to share engines with other pipelines; it is then yours to close, and `engine` and `threads` are its.
        """
        super().__init__("llm", model, engine=engine, threads=threads, hub=hub)

    @overload
    def __call__(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> ChatResult: ...
    @overload
    def __call__(self, prompt: Prompts, **options: Unpack[ChatOptions]) -> list[ChatResult]: ...
    def __call__(self, prompt: Prompt | Prompts, **options: Unpack[ChatOptions]) -> ChatResult | list[ChatResult]:
        """The answer to one prompt, or the answers to a list of prompts, in order."""
        return self.hub.run(self._answer(prompt, options))

    @overload
    async def call_async(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> ChatResult: ...
    @overload
    async def call_async(self, prompt: Prompts, **options: Unpack[ChatOptions]) -> list[ChatResult]: ...
    async def call_async(
        self, prompt: Prompt | Prompts, **options: Unpack[ChatOptions]
    ) -> ChatResult | list[ChatResult]:
        """`chat(...)` for a caller on an event loop; cancelling it aborts the requests."""
        return await self.hub.run_async(self._answer(prompt, options))

    def stream(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> ChatStream:
        """Iterate the answer's pieces of text as they come. Raises at once what is wrong with the request."""
        return ChatStream(_Answer(self.hub, _request(self.model, prompt, options)))

    def stream_async(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> AsyncChatStream:
        """`stream` for `async for`; leaving it early (`aclose`, or the `async with` block's end) aborts the request."""
        return AsyncChatStream(_Answer(self.hub, _request(self.model, prompt, options)))

    async def _answer(self, prompt: Prompt | Prompts, options: ChatOptions) -> ChatResult | list[ChatResult]:
        """Runs on the hub's loop."""
        many = _many(prompt)
        if many is None:
            return await _collect(self.hub, _request(self.model, cast(Prompt, prompt), options))
        requests = [_request(self.model, one, options) for one in many]
        return await together(lambda request: _collect(self.hub, request), requests, most=NUM_TOGETHER)


# ------------------------------------------------------------------------------------------------------------- streams


class _Answer(Collected[str, ChatResult]):
    """One answer on its way; its pieces are texts, and two of them join to a larger one."""

    what = "answer"

    def __init__(self, hub: Hub, request: TextRequest) -> None:
        super().__init__(hub)
        self._request = request

    async def _run(self, ready: Future[None]) -> ChatResult:
        parts = _Parts()
        prepared = await self.hub.text.prepare(self._request)
        ready.set_result(None)
        async for event in self.hub.text.stream(prepared):
            if text := parts.add(event):
                self._put(text)
        return parts.result()

    def _join(self, last: str, new: str) -> str:
        return last + new


class ChatStream(CollectedStream[str, ChatResult]):
    """Pieces of an answer, in order. After the last one `result` holds the whole."""


class AsyncChatStream(AsyncCollectedStream[str, ChatResult]):
    """`ChatStream` for `async for`. The request starts with the first piece asked for."""


# --------------------------------------------------------------------------------------------------- requests, results


class _Parts:
    """Events of one answer on their way to a ChatResult."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TextLogprob] | None = None
        self._done: TextDone | None = None

    def add(self, event: object) -> str:
        """Take one event; gives its new text. Raises what ended the request early."""
        match event:
            case TextDelta():
                self._texts.append(event.text)
                self._token_ids.extend(event.token_ids)
                if event.logprobs is not None:
                    self._logprobs = (self._logprobs or []) + list(event.logprobs)
                return event.text
            case TextDone():
                self._done = event
            case TextFailed():
                raise from_info(event.error)
            case TextAborted():
                raise Unavailable(f"the request was aborted: {event.reason}", code="aborted")
        return ""

    def result(self) -> ChatResult:
        assert self._done is not None, "a request ends in exactly one terminal event"
        return ChatResult(
            text="".join(self._texts),
            finish_reason=self._done.finish_reason,
            stop_reason=self._done.stop_reason,
            usage=self._done.usage,
            timing=ChatTiming.of(self._done.timing, self._done.usage),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


async def _collect(hub: Hub, request: TextRequest) -> ChatResult:
    parts = _Parts()
    async for event in hub.text.stream(await hub.text.prepare(request)):
        parts.add(event)
    return parts.result()


def _many(prompt: Prompt | Prompts) -> Sequence[Prompt] | None:
    """The prompts of a list of prompts; None for one text or one list of messages."""
    if isinstance(prompt, (list, tuple)) and not (prompt and isinstance(prompt[0], Mapping)):
        return cast(Sequence[Prompt], prompt)
    return None


def _request(model: str, prompt: Prompt, options: ChatOptions) -> TextRequest:
    """The frontend's request for one prompt. Raises InvalidRequest for what cannot be asked."""
    messages = _messages(prompt, options.get("system"))
    stop = options.get("stop", ())
    return TextRequest(
        model=model,
        messages=messages,
        params=_params(options),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        priority=options.get("priority", 0),
    )


def _messages(prompt: Prompt, system: str | None) -> list[Message]:
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt):
        messages = list(cast(Sequence[Message], prompt))
    else:
        raise InvalidRequest(f"a prompt is a text or a list of messages, got {type(prompt).__name__}", param="prompt")
    if system is None:
        return messages
    if messages and messages[0].get("role") == "system":
        raise InvalidRequest("`system` was given, but the messages already begin with a system message", param="system")
    return [{"role": "system", "content": system}, *messages]


def _params(options: ChatOptions) -> SamplingParams:
    given: dict[str, Any] = {**options}
    params = given.pop("params", None) or SamplingParams()
    for name in ("stop", "system", "priority"):
        given.pop(name, None)
    known = SamplingParams.__struct_fields__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, ChatOptions.__annotations__, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown option {name!r}{hint}", param=name)
    assert isinstance(params, SamplingParams)
    return msgspec.structs.replace(params, **given)

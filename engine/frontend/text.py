"""The text frontend: from a `TextRequest` to engine requests, from their events to text. Lives with the client.

`prepare` does everything that can refuse a request (template, tokenizing, lengths, parameters) and submits nothing;
`stream` submits and yields `TextEvent`s. Between the two a server can still answer with a clean 4xx.

Knows text and the `EngineClient`; not HTTP, not the model.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...models.tokenizer import Tokenizer, load_tokenizer
from ..client import EngineClient
from ..errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from ..params import MAX_SEED, check_length, check_params
from ..types import Aborted, AnyEvent, Done, Failed, ModelInfo, Request, SamplingParams, Timing, Tokens, Usage
from .assembly import TextAssembly, to_text_logprob
from .events import PromptInfo, TextAborted, TextDone, TextEvent, TextFailed, TextRequest
from .stop import StopAutomaton, check_stops

MAX_CHOICES = 128
_INLINE_CHARS = 2048  # shorter texts are tokenized on the event loop: a thread costs more than they do
_TEMPLATE_SLACK_CHARS = 65536  # what a template may write beyond the longest prompt that fits


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that passed every check here. `children` are not yet submitted."""

    request: TextRequest
    info: ModelInfo
    tokenizer: Tokenizer
    prompt_ids: list[int]
    prompt_text: str | None  # for echo
    children: list[Request]
    automaton: StopAutomaton | None


class TextFrontend:
    """Text in, text out, over one `EngineClient`. One object serves any number of requests at once."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()

    # ----------------------------------------------------------------------------------------------------- preparing

    async def tokenizer(self, info: ModelInfo) -> Tokenizer:
        """The tokenizer of a loaded model, loaded once. Raises ModelLoadError; InvalidRequest where the answers are no text."""
        if info.num_codebooks > 1:
            raise InvalidRequest(f"model {info.model[:80]!r} answers in codes of audio, not in text", param="model")
        found = self._tokenizers.get(info.source)
        if found is None:
            async with self._loading:
                found = self._tokenizers.get(info.source)
                if found is None:
                    found = await asyncio.to_thread(load_tokenizer, info.source)
                    self._tokenizers[info.source] = found
        return found

    async def tokenize(self, request: TextRequest) -> list[int]:
        """Prompt ids as a request would have them, without length checks beyond the bound on work."""
        info = await self._client.load(request.model)
        return await self._prompt_ids(request, info, await self.tokenizer(info))

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        info = await self._client.load(model)
        _check_ids(token_ids, info.vocab_size)
        tokenizer = await self.tokenizer(info)
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def prepare(self, request: TextRequest) -> Prepared:
        """Check and tokenize. Raises MotetError; nothing has been submitted then."""
        if not isinstance(request.n, int) or not 1 <= request.n <= MAX_CHOICES:
            raise InvalidRequest(f"n: expected 1 to {MAX_CHOICES}, got {request.n}", param="n")
        stops = check_stops(request.stop)
        info = await self._client.load(request.model)
        check_params(request.params, info.vocab_size)
        tokenizer = await self.tokenizer(info)
        ids = await self._prompt_ids(request, info, tokenizer)
        ids = _truncate(ids, request.truncate_prompt_tokens, info.max_model_len)
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed", param=_prompt_field(request))
        check_length(len(ids), request.params.max_tokens, info.max_model_len, param=_prompt_field(request))
        return Prepared(
            request=request,
            info=info,
            tokenizer=tokenizer,
            prompt_ids=ids,
            prompt_text=self._echo_text(request, tokenizer, ids),
            children=_children(request, ids, _with_seed(request.params)),
            automaton=StopAutomaton(stops) if stops else None,
        )

    @staticmethod
    def _echo_text(request: TextRequest, tokenizer: Tokenizer, ids: list[int]) -> str | None:
        if not request.echo:
            return None
        if isinstance(request.prompt, str) and request.truncate_prompt_tokens is None:
            return request.prompt
        return tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)

    async def _prompt_ids(self, request: TextRequest, info: ModelInfo, tokenizer: Tokenizer) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("expected either a prompt or messages", param="prompt")
        if request.continue_final_message and request.messages is None:
            raise InvalidRequest("continue_final_message needs messages", param="continue_final_message")
        limit = info.max_model_len * tokenizer.longest_token_bytes()  # more characters than this never fit
        if request.messages is not None:
            if request.echo:
                raise UnsupportedParameter("echo is for completions, not for chats", param="echo")
            return await _off_loop(
                _num_chars(request.messages, limit), lambda: _encode_chat(request, tokenizer, limit, info.max_model_len)
            )
        prompt = request.prompt
        if isinstance(prompt, str):
            _check_chars(len(prompt), limit, info.max_model_len, "prompt")
            return await _off_loop(
                len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
            )
        assert prompt is not None
        _check_ids(prompt, info.vocab_size)
        return list(prompt)

    # ----------------------------------------------------------------------------------------------------- streaming

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """`prepare` and `stream` in one; errors of the former are raised at the first step."""
        stream = self.stream(await self.prepare(request))
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    def stream(self, prepared: Prepared) -> AsyncGenerator[TextEvent, None]:
        """Submit and yield: PromptInfo, deltas, one terminal event per choice. Closing it aborts what still runs."""
        # Not a generator around generators: each layer would cost every token of every stream.
        return self._choice(prepared, 0) if len(prepared.children) == 1 else self._choices(prepared)

    async def _choices(self, prepared: Prepared) -> AsyncGenerator[TextEvent, None]:
        merged = self._merged(prepared)
        try:
            informed = False
            async for event in merged:
                # Every choice tells about the prompt; once is enough.
                if isinstance(event, PromptInfo):
                    if informed:
                        continue
                    informed = True
                yield event
        finally:
            await merged.aclose()

    async def _merged(self, prepared: Prepared) -> AsyncGenerator[TextEvent, None]:
        """All choices' events as they come. A choice waits until its event was taken, so the client can coalesce."""
        queue: asyncio.Queue[TextEvent | BaseException | None] = asyncio.Queue(maxsize=1)
        started = asyncio.Event()  # the first choice has told about the prompt
        if prepared.request.params.prompt_logprobs is None:
            started.set()

        async def run(index: int) -> None:
            ending: BaseException | None = None
            choice = self._choice(prepared, index)
            try:
                if index:
                    await started.wait()
                async for event in choice:
                    await queue.put(event)
                    if not index:
                        started.set()
            except Exception as error:  # handed to the reader
                ending = error
            finally:
                await choice.aclose()
                started.set()
            await queue.put(ending)

        tasks = [asyncio.create_task(run(index)) for index in range(len(prepared.children))]
        try:
            left = len(tasks)
            while left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    left -= 1
                else:
                    yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, prepared: Prepared, index: int) -> AsyncGenerator[TextEvent, None]:
        child = prepared.children[index]
        request = prepared.request
        wants_logprobs = child.params.logprobs is not None
        assembly = TextAssembly(
            prepared.tokenizer,
            index,
            prepared.automaton,
            min_tokens=child.params.min_tokens,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
        )
        clock = _Clock()
        informed = False
        num_cached = 0
        events = self._client.submit(child)
        try:
            async for event in events:
                if not informed and not isinstance(event, Failed):
                    informed = True
                    yield _prompt_info(prepared, event)
                if isinstance(event, Tokens):
                    num_cached = max(num_cached, event.num_cached_tokens)
                    clock.token()
                    delta = assembly.push(event.token_ids, event.logprobs)
                    if delta is not None:
                        yield delta
                    if assembly.stopped is not None:
                        await self._client.abort(child.request_id, "stop")
                        usage = Usage(
                            num_prompt_tokens=len(child.prompt),
                            num_cached_tokens=num_cached,
                            num_output_tokens=assembly.num_kept,
                        )
                        yield TextDone(
                            index=index,
                            finish_reason="stop",
                            stop_reason=assembly.stopped.stop,
                            usage=usage,
                            timing=clock.timing(),
                        )
                        return
                    continue
                terminal = _terminal(event, index, prepared, assembly)
                if terminal is None:
                    continue
                if not isinstance(event, Failed):
                    delta = assembly.finish(logprobs=wants_logprobs)
                    if delta is not None:
                        yield delta
                    terminal = _terminal(event, index, prepared, assembly)  # the last characters may complete a stop
                    assert terminal is not None
                yield terminal
                return
        finally:
            await _close(events)


# ---------------------------------------------------------------------------------------------------------- preparing


async def _off_loop(num_chars: int, work: Any) -> list[int]:
    result: list[int] = work() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(work)
    return result


def _encode_chat(request: TextRequest, tokenizer: Tokenizer, limit: int, max_model_len: int) -> list[int]:
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest("this model has no chat template; send a prompt instead of messages", param="messages")
    assert request.messages is not None
    _check_chars(_num_chars(request.messages, limit), limit, max_model_len, "messages")
    rendered = template.render(
        request.messages,
        tools=request.tools,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.template_kwargs,
        max_chars=limit + _TEMPLATE_SLACK_CHARS,
    )
    _check_chars(len(rendered.text), limit, max_model_len, "messages")
    return tokenizer.encode_prompt(rendered)


def _num_chars(value: Any, limit: int, depth: int = 0) -> int:
    """Characters of all strings in messages; counting ends soon after `limit`."""
    if isinstance(value, str):
        return len(value)
    items: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    total = 0
    for item in items:
        if total > limit or depth > 64:
            break
        total += _num_chars(item, limit, depth + 1)
    return total


def _check_chars(num_chars: int, limit: int, max_model_len: int, param: str) -> None:
    if num_chars > limit:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens, which hold at most {limit} characters; "
            f"{param} has more ({num_chars})",
            param=param,
        )


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            shown = token_id if isinstance(token_id, int) else type(token_id).__name__
            raise InvalidRequest(
                f"token ids: expected integers from 0 to {vocab_size - 1}, got {shown}", param="prompt"
            )


def _prompt_field(request: TextRequest) -> str:
    return "messages" if request.prompt is None else "prompt"


def _truncate(ids: list[int], keep: int | None, max_model_len: int) -> list[int]:
    if keep is None:
        return ids
    if not isinstance(keep, int) or keep == 0 or keep < -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected -1 or at least 1, got {keep}", param="truncate_prompt_tokens"
        )
    if keep > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected at most {max_model_len} (the context), got {keep}",
            param="truncate_prompt_tokens",
        )
    return ids[-(max_model_len - 1 if keep == -1 else keep) :]


def _with_seed(params: SamplingParams) -> SamplingParams:
    """The caller's parameters, with a seed of their own where they bring none."""
    # max_tokens None stays: the engine fills what its memory has room for, which may be less than the context.
    return params if params.seed is not None else msgspec.structs.replace(params, seed=secrets.randbits(62))


def _children(request: TextRequest, ids: list[int], params: SamplingParams) -> list[Request]:
    request_id = request.request_id or f"req-{secrets.token_hex(12)}"
    assert params.seed is not None
    out = []
    for index in range(request.n):
        seed = params.seed + index
        # One choice is enough to score the prompt, and the others can then take it from the cache.
        mine = msgspec.structs.replace(
            params,
            seed=seed if seed <= MAX_SEED else seed - MAX_SEED - 1,
            prompt_logprobs=None if index else params.prompt_logprobs,
        )
        out.append(
            Request(
                request_id=f"{request_id}-{index}",
                model=request.model,
                prompt=ids,
                params=mine,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )
    return out


# ---------------------------------------------------------------------------------------------------------- streaming


class _Clock:
    """Times of a choice that the frontend itself ends; the engine gives the times of all others."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None

    def token(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def timing(self) -> Timing:
        now = time.monotonic()
        return Timing(first_token_s=(self._first or now) - self._start, total_s=now - self._start)


def _prompt_info(prepared: Prepared, event: AnyEvent) -> PromptInfo:
    logprobs = None
    if isinstance(event, Tokens) and event.prompt_logprobs is not None:
        logprobs = [
            None if entry is None else to_text_logprob(prepared.tokenizer, entry) for entry in event.prompt_logprobs
        ]
    return PromptInfo(
        num_prompt_tokens=len(prepared.prompt_ids),
        token_ids=prepared.prompt_ids,
        prompt_logprobs=logprobs,
        text=prepared.prompt_text,
    )


def _terminal(
    event: AnyEvent, index: int, prepared: Prepared, assembly: TextAssembly
) -> TextDone | TextFailed | TextAborted | None:
    """The end of a choice in the frontend's words; None for an event that does not end it."""
    if isinstance(event, Failed):
        return TextFailed(index=index, error=event.error)
    if isinstance(event, Aborted):
        return TextAborted(index=index, reason=event.reason, usage=event.usage)
    if not isinstance(event, Done):
        return None
    if assembly.stopped is not None:
        usage = msgspec.structs.replace(event.usage, num_output_tokens=assembly.num_kept)
        return TextDone(
            index=index, finish_reason="stop", stop_reason=assembly.stopped.stop, usage=usage, timing=event.timing
        )
    asked = prepared.request.params.stop_token_ids
    reason = event.stop_token if event.stop_token is not None and event.stop_token in asked else None
    return TextDone(
        index=index, finish_reason=event.finish_reason, stop_reason=reason, usage=event.usage, timing=event.timing
    )


async def _close(events: AsyncIterator[AnyEvent]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()

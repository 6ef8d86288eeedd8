"""POST /v1/completions: plain prompts (text or ids, one or many) in; text, with echo and column-wise logprobs, out."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from ..engine.errors import InvalidRequest, UnsupportedParameter
from ..engine.frontend.events import PromptInfo, TextDelta, TextDone, TextEvent, TextLogprob, TextRequest
from ..engine.frontend.text import Prepared
from .exchange import Exchange, new_id
from .generation import Generation, sampling_params, stop_strings
from .openai_chat import check_stream_options, finite, prompt_logprobs_body
from .protocol import (
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    encode,
    refuse_unsupported,
)

_decoder = msgspec.json.Decoder(CompletionRequest)
_DEFAULT_MAX_TOKENS = 16


async def completions(exchange: Exchange) -> None:
    request = await exchange.read_json(_decoder)
    await exchange.watched(_answer(exchange, request))


async def _answer(exchange: Exchange, request: CompletionRequest) -> None:
    refuse_unsupported(request)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise UnsupportedParameter("best_of: only the value of n is supported", param="best_of")
    prompts = _prompts(request)
    if len(prompts) * n > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt: expected at most {MAX_PROMPTS} answers in one request, got {len(prompts) * n}", param="prompt"
        )
    include_usage = check_stream_options(request.stream, request.stream_options)
    model = exchange.service.model(request.model)
    exchange.model = model.id
    answer_id = new_id("cmpl")
    generation = Generation(
        exchange,
        model,
        [_text_request(request, model.id, prompt, f"{answer_id}-{index}") for index, prompt in enumerate(prompts)],
    )
    await generation.prepare()
    answer = _Answer(generation, request, answer_id, include_usage)
    if request.stream:
        await generation.stream(answer.chunk, opening=b"", closing=answer.usage)
    else:
        await _whole(exchange, answer)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one by one. A flat list of ids is one prompt."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    prompts = [item for item in given if not isinstance(item, int)]
    if len({type(item) for item in given}) != 1:
        raise InvalidRequest("prompt: expected texts, or ids, or lists of ids, got a mixture", param="prompt")
    return prompts


def _text_request(request: CompletionRequest, model: str, prompt: str | list[int], request_id: str) -> TextRequest:
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return TextRequest(
        model=model,
        prompt=prompt,
        params=sampling_params(
            request, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=prompt_logprobs
        ),
        stop=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        n=request.n or 1,
        echo=bool(request.echo),
        priority=request.priority or 0,
        add_special_tokens=request.add_special_tokens is not False,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        return_token_ids=bool(request.return_token_ids),
        skip_special_tokens=request.skip_special_tokens is not False,
        request_id=request_id,
    )


@dataclass
class _Columns:
    """Logprobs as this API wants them: one list per property."""

    num_top: int
    offset: int = 0  # characters so far
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: str, entry: TextLogprob | None) -> None:
        self.tokens.append(token)
        self.text_offset.append(self.offset)
        self.offset += len(token)
        self.token_logprobs.append(None if entry is None else finite(entry.logprob))
        if entry is None:
            self.top_logprobs.append(None)
        else:
            top = {other.token: finite(other.logprob) for other in entry.top[: self.num_top]}
            top.setdefault(entry.token, finite(entry.logprob))
            self.top_logprobs.append(top)

    def take(self) -> CompletionLogprobs:
        """What was added since the last take."""
        taken = CompletionLogprobs(
            tokens=self.tokens,
            token_logprobs=self.token_logprobs,
            top_logprobs=self.top_logprobs,
            text_offset=self.text_offset,
        )
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken


@dataclass
class _Choice:
    index: int
    columns: _Columns | None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: TextDone | None = None
    prompt: PromptInfo | None = None


class _Answer:
    """All choices of one request: events go in, a whole answer or chunks come out."""

    def __init__(self, generation: Generation, request: CompletionRequest, answer_id: str, include_usage: bool) -> None:
        self.generation = generation
        self.request = request
        self.id = answer_id
        self.created = int(time.time())
        self.n = request.n or 1
        self.include_usage = include_usage
        self.usage_field: Any = None if include_usage else UNSET
        self.choices = [
            _Choice(index, None if request.logprobs is None else _Columns(request.logprobs))
            for index in range(self.n * len(generation.requests))
        ]
        head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[{"index":' % (
            encode(answer_id),
            self.created,
            encode(generation.model.id),
        )
        self.heads = [head + b'%d,"text":' % choice.index for choice in self.choices]
        self.tail = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null}\n\n' if include_usage else b"}\n\n")
        self.is_plain = request.logprobs is None and not request.return_token_ids

    def echo(self, prompt: int, info: PromptInfo) -> list[_Choice]:
        """Put the prompt in front of its choices; returns those."""
        prepared: Prepared = self.generation.prepared[prompt]
        chosen = self.choices[prompt * self.n : (prompt + 1) * self.n]
        for choice in chosen:
            choice.prompt = info
            if info.text is not None:
                choice.texts.append(info.text)
                if choice.columns is not None:
                    for position, token_id in enumerate(info.token_ids):
                        entry = info.prompt_logprobs[position] if info.prompt_logprobs else None
                        choice.columns.add(entry.token if entry else prepared.tokenizer.token_text(token_id), entry)
        return chosen

    def add(self, prompt: int, event: TextDelta) -> _Choice:
        choice = self.choices[prompt * self.n + event.index]
        choice.texts.append(event.text)
        if choice.columns is not None:
            for entry in event.logprobs or ():
                choice.columns.add(entry.token, entry)
        if self.request.return_token_ids:
            choice.token_ids += event.token_ids
        return choice

    def chunk(self, prompt: int, event: TextEvent) -> bytes:
        """The bytes of one event of a stream; empty for what is not told."""
        if type(event) is TextDelta:
            if self.is_plain:
                index = prompt * self.n + event.index
                return self.heads[index] + encode(event.text) + self.tail if event.text else b""
            return self._frame(self.add(prompt, event))
        if type(event) is TextDone:
            choice = self.choices[prompt * self.n + event.index]
            choice.end = event
            return self._frame(choice)
        if type(event) is PromptInfo:
            told = event.text is not None or self.request.return_token_ids or self.request.prompt_logprobs is not None
            chosen = self.echo(prompt, event)
            return b"".join(map(self._frame, chosen)) if told else b""
        return b""

    def _frame(self, choice: _Choice) -> bytes:
        return b"data: " + encode(self.completion([self.take(choice)])) + b"\n\n"

    def take(self, choice: _Choice) -> CompletionChoice:
        """What has come for the choice and was not taken yet."""
        end, info, request = choice.end, choice.prompt, self.request
        told = CompletionChoice(
            index=choice.index,
            text="".join(choice.texts),
            logprobs=None if choice.columns is None else choice.columns.take(),
            finish_reason=end.finish_reason if end else None,
            stop_reason=end.stop_reason if end else UNSET,
            token_ids=choice.token_ids if request.return_token_ids else UNSET,
            prompt_token_ids=list(info.token_ids) if info and request.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs_body(info) if info and request.prompt_logprobs is not None else UNSET,
        )
        choice.texts, choice.token_ids, choice.prompt = [], [], None
        return told

    def usage(self) -> bytes:
        """The chunk after the last, when it was asked for."""
        if not self.include_usage:
            return b""
        return b"data: " + encode(self.completion([], self.generation.usage())) + b"\n\n"

    def completion(self, choices: list[CompletionChoice], usage: Any = UNSET) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.generation.model.id,
            choices=choices,
            usage=self.usage_field if usage is UNSET else usage,
        )


async def _whole(exchange: Exchange, answer: _Answer) -> None:
    generation = answer.generation
    async with contextlib.aclosing(generation.batches()) as batches:
        async for batch in batches:
            for prompt, event in batch:
                if type(event) is TextDelta:
                    answer.add(prompt, event)
                elif type(event) is TextDone:
                    answer.choices[prompt * answer.n + event.index].end = event
                elif type(event) is PromptInfo:
                    answer.echo(prompt, event)
    whole = answer.completion([answer.take(choice) for choice in answer.choices], generation.usage())
    await exchange.send_struct(whole, headers=[(b"x-motet-queue-ms", b"%d" % (generation.queue_s * 1e3))])

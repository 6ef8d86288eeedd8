"""POST /v1/chat/completions: messages in, one answer or a stream of chunks out."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from ..engine.errors import InvalidRequest, UnsupportedParameter
from ..engine.frontend.events import PromptInfo, TextDelta, TextDone, TextEvent, TextLogprob, TextRequest
from .exchange import Exchange, new_id
from .generation import Generation, sampling_params, stop_strings
from .protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    RefusalPart,
    StreamOptions,
    TextPart,
    TokenLogprobBody,
    TopLogprob,
    encode,
    refuse_unsupported,
)

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(exchange: Exchange) -> None:
    request = await exchange.read_json(_decoder)
    await exchange.watched(_answer(exchange, request))


async def _answer(exchange: Exchange, request: ChatRequest) -> None:
    refuse_unsupported(request)
    if request.echo:
        raise UnsupportedParameter("'echo' is not supported for chat", param="echo")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: expected logprobs to be true with it", param="top_logprobs")
    include_usage = check_stream_options(request.stream, request.stream_options)
    model = exchange.service.model(request.model)
    exchange.model = model.id
    generation = Generation(exchange, model, [_text_request(request, model.id, new_id("chatcmpl"))])
    await generation.prepare()
    if request.stream:
        await _Stream(generation, request, include_usage).run()
    else:
        await _whole(exchange, generation, request)


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether the usage chunk was asked for."""
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options: expected stream to be true with it", param="stream_options")
    if options.continuous_usage_stats:
        raise UnsupportedParameter(
            "'stream_options.continuous_usage_stats' is not supported by this server",
            param="stream_options.continuous_usage_stats",
        )
    return bool(options.include_usage)


def _text_request(request: ChatRequest, model: str, answer_id: str) -> TextRequest:
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    continue_final = bool(request.continue_final_message)
    if continue_final and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: expected add_generation_prompt to be false with it", param="continue_final_message"
        )
    return TextRequest(
        model=model,
        prompt=None,
        messages=template_messages(request.messages),
        params=sampling_params(
            request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
        ),
        stop=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        n=request.n or 1,
        priority=request.priority or 0,
        template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=not continue_final and request.add_generation_prompt is not False,
        continue_final_message=continue_final,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        return_token_ids=bool(request.return_token_ids),
        skip_special_tokens=request.skip_special_tokens is not False,
        request_id=answer_id,
    )


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the chat template wants them: role and plain text content."""
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise UnsupportedParameter(
            f"{where}.role: {message.role!r} is not supported by this server", param=f"{where}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedParameter(f"{where}.{name} is not supported by this server", param=f"{where}.{name}")
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{where}.content: expected text, got null", param=f"{where}.content")
        content = message.refusal or ""
    if isinstance(content, list):
        texts = []
        for index, part in enumerate(content):
            if isinstance(part, TextPart):
                texts.append(part.text)
            elif isinstance(part, RefusalPart):
                texts.append(part.refusal)
            else:
                kind = part.__struct_config__.tag
                place = f"{where}.content[{index}]"
                raise UnsupportedParameter(
                    f"{place}: parts of type {kind!r} are not supported by this model", param=f"{place}.type"
                )
        content = "\n".join(texts)
    return {"role": message.role, "content": content} | ({"name": message.name} if message.name else {})


def logprob_body(entry: TextLogprob) -> TokenLogprobBody:
    return TokenLogprobBody(
        token=entry.token,
        logprob=finite(entry.logprob),
        bytes=list(entry.bytes),
        top_logprobs=[
            TopLogprob(token=top.token, logprob=finite(top.logprob), bytes=list(top.bytes)) for top in entry.top
        ],
    )


def finite(logprob: float) -> float:
    """JSON has no infinity; the API's word for "as good as impossible" is -9999."""
    return max(logprob, -9999.0)


def prompt_logprobs_body(info: PromptInfo) -> list[TokenLogprobBody | None]:
    return [None if entry is None else logprob_body(entry) for entry in info.prompt_logprobs or ()]


async def _whole(exchange: Exchange, generation: Generation, request: ChatRequest) -> None:
    n = request.n or 1
    texts: list[list[str]] = [[] for _ in range(n)]
    logprobs: list[list[TokenLogprobBody]] = [[] for _ in range(n)]
    token_ids: list[list[int]] = [[] for _ in range(n)]
    ends: dict[int, TextDone] = {}
    prompt: PromptInfo | None = None
    created = int(time.time())
    async with contextlib.aclosing(generation.batches()) as batches:
        async for batch in batches:
            for _, event in batch:
                if type(event) is TextDelta:
                    texts[event.index].append(event.text)
                    if event.logprobs:
                        logprobs[event.index] += [logprob_body(entry) for entry in event.logprobs]
                    if request.return_token_ids:
                        token_ids[event.index] += event.token_ids
                elif type(event) is TextDone:
                    ends[event.index] = event
                elif type(event) is PromptInfo:
                    prompt = event
    choices = [
        ChatChoice(
            index=index,
            message=AnswerMessage(content="".join(texts[index])),
            logprobs=ChatLogprobs(content=logprobs[index]) if request.logprobs else None,
            finish_reason=ends[index].finish_reason,
            stop_reason=ends[index].stop_reason,
            token_ids=token_ids[index] if request.return_token_ids else msgspec.UNSET,
        )
        for index in range(n)
    ]
    with_ids = prompt is not None and request.return_token_ids
    with_logprobs = prompt is not None and request.prompt_logprobs is not None
    await exchange.send_struct(
        ChatCompletion(
            id=generation.requests[0].request_id,
            created=created,
            model=generation.model.id,
            choices=choices,
            usage=generation.usage(),
            prompt_token_ids=list(prompt.token_ids) if prompt and with_ids else msgspec.UNSET,
            prompt_logprobs=prompt_logprobs_body(prompt) if prompt and with_logprobs else msgspec.UNSET,
        ),
        headers=[(b"x-motet-queue-ms", b"%d" % (generation.queue_s * 1e3))],
    )


class _Stream:
    """The chunks of one streamed chat. A token's chunk is put together from bytes made once per choice."""

    def __init__(self, generation: Generation, request: ChatRequest, include_usage: bool) -> None:
        self.generation = generation
        self.request = request
        self.include_usage = include_usage
        self.id = generation.requests[0].request_id
        self.created = int(time.time())
        self.usage_field: Any = None if include_usage else msgspec.UNSET
        head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[{"index":' % (
            encode(self.id),
            self.created,
            encode(generation.model.id),
        )
        self.heads = [head + b'%d,"delta":{"content":' % index for index in range(request.n or 1)]
        self.tail = b',"finish_reason":null}]' + (b',"usage":null}\n\n' if include_usage else b"}\n\n")
        self.plain_tail = b'},"logprobs":null' + self.tail

    async def run(self) -> None:
        await self.generation.stream(self.chunk, opening=self.roles(), closing=self.usage)

    def usage(self) -> bytes:
        """The chunk after the last, when it was asked for."""
        if not self.include_usage:
            return b""
        model = self.generation.model.id
        usage = self.generation.usage()
        return self.frame(ChatChunk(id=self.id, created=self.created, model=model, choices=[], usage=usage))

    def chunk(self, prompt: int, event: TextEvent) -> bytes:
        """The bytes of one event; empty for what is not told."""
        if type(event) is TextDelta:
            if not event.logprobs and not self.request.return_token_ids:
                return self.heads[event.index] + encode(event.text) + self.plain_tail if event.text else b""
            logprobs = b"null"
            if event.logprobs:
                logprobs = encode(ChatLogprobs(content=[logprob_body(entry) for entry in event.logprobs]))
            ids = b',"token_ids":' + encode(event.token_ids) if self.request.return_token_ids else b""
            return b"".join((self.heads[event.index], encode(event.text), b'},"logprobs":', logprobs, ids, self.tail))
        if type(event) is TextDone:
            return self.frame(
                self._chunk(
                    ChunkChoice(
                        index=event.index,
                        delta=Delta(),
                        finish_reason=event.finish_reason,
                        stop_reason=event.stop_reason,
                    )
                )
            )
        if type(event) is PromptInfo and (self.request.return_token_ids or self.request.prompt_logprobs is not None):
            return self.frame(
                ChatChunk(
                    id=self.id,
                    created=self.created,
                    model=self.generation.model.id,
                    choices=[],
                    usage=self.usage_field,
                    prompt_token_ids=list(event.token_ids) if self.request.return_token_ids else msgspec.UNSET,
                    prompt_logprobs=(
                        prompt_logprobs_body(event) if self.request.prompt_logprobs is not None else msgspec.UNSET
                    ),
                )
            )
        return b""

    def roles(self) -> bytes:
        delta = Delta(role="assistant", content="")
        return b"".join(
            self.frame(self._chunk(ChunkChoice(index=index, delta=delta))) for index in range(self.request.n or 1)
        )

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.generation.model.id, choices=[choice], usage=self.usage_field
        )

    @staticmethod
    def frame(chunk: msgspec.Struct) -> bytes:
        return b"data: " + encode(chunk) + b"\n\n"

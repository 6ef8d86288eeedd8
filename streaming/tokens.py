"""POST /tokenize and /detokenize: the ids a prompt or a chat would have, and back."""

from __future__ import annotations

import msgspec

from ..engine.errors import InvalidRequest
from ..engine.frontend.events import TextRequest
from .exchange import Exchange
from .openai_chat import template_messages
from .protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(exchange: Exchange) -> None:
    request = await exchange.read_json(_tokenize_decoder)
    await exchange.watched(_tokenize(exchange, request))


async def detokenize(exchange: Exchange) -> None:
    request = await exchange.read_json(_detokenize_decoder)
    await exchange.watched(_detokenize(exchange, request))


async def _tokenize(exchange: Exchange, request: TokenizeRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("expected either prompt or messages", param="prompt")
    service = exchange.service
    model = service.model(request.model)
    exchange.model = model.id
    continue_final = bool(request.continue_final_message)
    text = TextRequest(
        model=model.id,
        prompt=request.prompt,
        messages=None if request.messages is None else template_messages(request.messages),
        add_special_tokens=request.add_special_tokens is not False,
        template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=not continue_final and request.add_generation_prompt is not False,
        continue_final_message=continue_final,
    )
    ids = await service.frontend.tokenize(text)
    info = await service.client.load(model.id)
    service.max_model_lens[model.id] = info.max_model_len
    strings = None
    if request.return_token_strs:
        tokenizer = await service.frontend.tokenizer(info)
        strings = [tokenizer.token_text(token_id) for token_id in ids]
    await exchange.send_struct(
        TokenizeResponse(count=len(ids), max_model_len=info.max_model_len, tokens=ids, token_strs=strings)
    )


async def _detokenize(exchange: Exchange, request: DetokenizeRequest) -> None:
    service = exchange.service
    model = service.model(request.model)
    exchange.model = model.id
    text = await service.frontend.detokenize(model.id, request.tokens)
    await exchange.send_struct(DetokenizeResponse(prompt=text))

"""GET /v1/models and /v1/models/{id}: what is served here, loaded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ServedModel
from .exchange import Exchange
from .protocol import ModelBody, ModelList

_CAPABILITIES = {
    "llm": ["chat", "completions"],
    "asr": ["transcriptions", "translations", "realtime"],
    "tts": ["speech"],
}


async def list_models(exchange: Exchange) -> None:
    states, lengths = await _loaded(exchange)
    await exchange.send_struct(
        ModelList(data=[_body(model, states, lengths) for model in exchange.service.config.models])
    )


async def get_model(exchange: Exchange) -> None:
    model = exchange.service.model(exchange.scope["path_params"]["model"], None)
    states, lengths = await _loaded(exchange)
    await exchange.send_struct(_body(model, states, lengths))


async def _loaded(exchange: Exchange) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """State and context length of the models that are loaded; nothing while the engine does not answer."""
    health = await exchange.service.health() or {}
    return health.get("models", {}), exchange.service.max_model_lens


def _body(model: ServedModel, states: Mapping[str, Any], lengths: Mapping[str, int]) -> ModelBody:
    return ModelBody(
        id=model.id,
        created=model.created,
        owned_by=model.owned_by,
        root=model.id,
        max_model_len=lengths.get(model.id),
        capabilities=_CAPABILITIES.get(model.kind, []),
        state=str(states.get(model.id, "unloaded")),
    )

"""GET /v1/models and /v1/models/{id}: what is served here, loaded or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from ..engine.frontend.pictures import PictureCard
from .config import ServedModel
from .exchange import Exchange
from .protocol import ModelBody, ModelList, PictureCardBody

_CAPABILITIES = {
    "llm": ["chat", "completions"],
    "asr": ["transcriptions", "translations", "realtime"],
    "tts": ["speech"],
    "image": ["images"],
}


async def list_models(exchange: Exchange) -> None:
    known = await _known(exchange, exchange.service.config.models)
    await exchange.send_struct(ModelList(data=[_body(model, known) for model in exchange.service.config.models]))


async def get_model(exchange: Exchange) -> None:
    model = exchange.service.model(exchange.scope["path_params"]["model"], None)
    await exchange.send_struct(_body(model, await _known(exchange, [model])))


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What loaded models tell: their state, context length, card. Nothing while the engine does not answer."""

    states: Mapping[str, Any]
    lengths: Mapping[str, int]
    cards: Mapping[str, PictureCard]


async def _known(exchange: Exchange, models: Sequence[ServedModel]) -> _Known:
    service = exchange.service
    states = (await service.health() or {}).get("models", {})
    cards = {}
    for model in models:
        if model.kind == "image" and states.get(model.id) == "loaded":
            card = await service.picture_card(model.id)
            if card is not None:
                cards[model.id] = card
    return _Known(states=states, lengths=service.max_model_lens, cards=cards)


def _body(model: ServedModel, known: _Known) -> ModelBody:
    card = known.cards.get(model.id)
    return ModelBody(
        id=model.id,
        created=model.created,
        owned_by=model.owned_by,
        root=model.id,
        max_model_len=known.lengths.get(model.id),
        capabilities=_CAPABILITIES.get(model.kind, []),
        state=str(known.states.get(model.id, "unloaded")),
        picture=UNSET if card is None else _card_body(card),
    )


def _card_body(card: PictureCard) -> PictureCardBody:
    rules = card.rules
    return PictureCardBody(
        sizes=[f"{width}x{height}" for width, height in rules.sizes],
        steps=rules.num_steps,
        max_steps=rules.num_steps if rules.few_step else rules.max_steps,
        few_step=rules.few_step,
        guidance=rules.guidance,
        guidance_scale=rules.guidance_scale,
        solver=rules.solver,
        solvers=list(rules.solvers),
        max_prompt_chars=rules.max_prompt_chars,
        takes_image=rules.takes_image,
    )

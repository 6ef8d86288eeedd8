"""Backbone and depth decoder of a tiny CSM against `transformers`: rows, codes and what a checkpoint must hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.models.build import build_model
from motet.models.loader import open_weights, read_config
from motet.models.multi_codebook import MultiCodebookModel
from motet.models.parameters import TensorSource
from motet.models.spec import Shard

from .csm_models import END, END_CODE, FIRST_TEXT, NUM_CODEBOOKS, NUM_CODES, csm, reference


def build(*, tied: bool = True, **more: Any) -> MultiCodebookModel:
    path = csm(tied=tied)
    model = build_model(read_config(path), open_weights(path), **more)
    assert isinstance(model, MultiCodebookModel)
    return model


def tensors() -> dict[str, torch.Tensor]:
    source = open_weights(csm())
    return {name: source.get(name) for name in source.names()}  # type: ignore[misc]


def greedy(logits: torch.Tensor, codebook: int) -> torch.Tensor:
    return logits.argmax(-1)


@torch.inference_mode()
def test_rows_of_frames_and_of_text_equal_the_reference() -> None:
    model, other = build(), reference()
    assert model.text_id(7) == FIRST_TEXT + 7 and model.vocab_size == FIRST_TEXT + 50
    frames = torch.randint(0, NUM_CODES, (6, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((frames[:, 0], torch.tensor([END, FIRST_TEXT + 7, FIRST_TEXT + 49])))
    side = torch.cat((frames[:, 1:], torch.full((3, NUM_CODEBOOKS - 1), END_CODE)))
    expected = [
        other.backbone_model.embed_tokens(frames[None])[0],
        other.backbone_model.embed_tokens(torch.full((1, 1, NUM_CODEBOOKS), END_CODE))[0],
        other.embed_text_tokens(torch.tensor([7, 49])),
    ]
    rows = model.embed(ids, None, side)
    torch.testing.assert_close(rows, torch.cat(expected))
    side[-2:] = 5  # of text they mean nothing
    assert torch.equal(model.embed(ids, None, side), rows)
    given = torch.randn(2, model.hidden_size)
    ids[[1, 7]] = 10**6  # a replaced row's id may be any number
    replaced = model.embed(ids, (torch.tensor([1, 7]), given), side)
    assert torch.equal(replaced[[1, 7]], given) and torch.equal(replaced[[0, 2, 8]], rows[[0, 2, 8]])


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_position_is_finished_as_the_reference_does_it(tied: bool) -> None:
    model, other = build(tied=tied), reference(tied=tied)
    for n in (1, 5, 40, 3):  # the pages are written over, and grow
        hidden = torch.randn(n, model.hidden_size, generator=torch.Generator().manual_seed(n))
        first = torch.arange(n) % (NUM_CODES - 1) + 1
        ids = torch.stack((torch.zeros(n, dtype=torch.int64), first), 1)
        for _ in range(NUM_CODEBOOKS - 1):
            logits = other.depth_decoder(input_ids=ids, backbone_last_hidden_state=hidden).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        assert torch.equal(model.finish_position(hidden.clone(), first, greedy), ids[:, 1:])


@torch.inference_mode()
def test_only_a_whole_frame_of_end_codes_is_the_end() -> None:
    model = build()
    hidden = torch.randn(4, model.hidden_size)
    said = torch.tensor([[0, 0, 0], [0, 0, 9], [0, 9, 0], [9, 0, 0]])
    ids = model.finish_position(hidden, torch.zeros(4, dtype=torch.int64), lambda logits, head: said[:, head - 1])
    # The last codebook is not asked, as in the reference.
    assert ids[:, 0].tolist() == [END, END, 0, 0] and torch.equal(ids[:, 1:], said)
    assert model.logits(hidden)[:, END].eq(-torch.inf).all()


@torch.inference_mode()
def test_bfloat16_and_int8_stay_near() -> None:
    plain = build()
    hidden = torch.randn(8, plain.hidden_size, generator=torch.Generator().manual_seed(2))

    def first_codes(model: MultiCodebookModel) -> torch.Tensor:
        logits = []
        model.finish_position(hidden.to(model.dtype), torch.arange(8), lambda x, head: logits.append(x) or x.argmax(-1))
        return logits[0]

    expected = first_codes(plain)
    for more in ({"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "quantize": "int8"}):
        got = first_codes(build(**more))
        assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_head.weight": None}, "1 missing: lm_head.weight"),
        ({"more.weight": torch.zeros(1)}, "1 unexpected: more.weight"),
        ({"codec_model.more": torch.zeros(1)}, ""),
        ({"depth_decoder.codebooks_head.weight": torch.zeros(2, 16, 20)}, "expected shape"),
        ({"embed_text_tokens.weight": torch.zeros(49, 32)}, "expected shape"),
    ],
)
def test_a_checkpoint_holds_what_it_must(change: dict[str, torch.Tensor | None], words: str) -> None:
    source = TensorSource({name: value for name, value in (tensors() | change).items() if value is not None})
    if not words:
        build_model(read_config(csm()), source)
        return
    with pytest.raises(ModelLoadError, match=words):
        build_model(read_config(csm()), source)


@pytest.mark.parametrize(
    "change",
    [
        {"num_codebooks": 1}, {"num_codebooks": 9}, {"num_codebooks": "x"}, {"codebook_eos_token_id": None},
        {"codebook_eos_token_id": 20}, {"depth_decoder_config": None}, {"depth_decoder_config": {}}, {"hidden_size": 0},
    ],
)  # fmt: skip
def test_an_unusable_config_is_an_error_of_its_own_kind(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        build_model(read_config(csm()) | change, open_weights(csm()))


def test_it_is_not_split_over_ranks() -> None:
    with pytest.raises(ModelLoadError, match="not split over ranks"):
        build(shard=Shard(tp_rank=0, tp_size=2))

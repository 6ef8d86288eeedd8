"""models/whisper.py against transformers on the same weights: features, logits, alignment; cached, batched, shared."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.kernels import attention
from motet.kernels.attention import quantize_rows
from motet.kernels.dispatch import cpu_ops
from motet.models.whisper import Whisper, load_whisper

from .whisper_models import TINY, save_small, speech_like, tiny_hf

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Whisper, Any]:
    folder = tmp_path_factory.mktemp("small-whisper")
    hf = save_small(folder)
    return load_whisper(folder), hf


@pytest.fixture(scope="module")
def tiny() -> Whisper:
    return load_whisper(TINY)


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def decode_all(model: Whisper, features: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Hidden rows of all ids in one call, of one window."""
    cache = model.new_cache(1)
    model.set_audio(cache, [0], features)
    return model.decode(ids, [0] * len(ids), range(len(ids)), cache)


def check_against(model: Whisper, hf: Any, ids: list[int]) -> None:
    mel = model.log_mel([speech_like(4.0)])
    with torch.no_grad():
        theirs = hf(input_features=mel, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    features = model.encode(mel)
    assert worst(features, theirs.encoder_last_hidden_state) <= TOLERANCE
    cache = model.new_cache(2)
    model.set_audio(cache, [1], features)
    hidden = model.decode(ids, [1] * len(ids), range(len(ids)), cache)
    assert worst(model.logits(hidden), theirs.logits[0]) <= TOLERANCE
    found = model.alignment(cache, 1, len(ids), 1500)
    expected = torch.stack([theirs.cross_attentions[layer][0, head] for layer, head in model.alignment_heads])
    assert found.shape == expected.shape and worst(found, expected) <= 1e-4
    part = model.alignment(cache, 1, 3, 200, start=2)
    cut = expected[:, 2:5, :200]
    assert worst(part, cut / cut.sum(-1, keepdim=True)) <= 1e-4


def test_a_small_random_model_against_transformers(small: tuple[Whisper, Any]) -> None:
    model, hf = small
    assert (model.config.heads, model.config.encoder_heads, model.config.decoder_ffn) == (4, 2, 160)
    check_against(model, hf, [50257, 11, 220, 50362, 7, 13, 9])


def test_packaged_tiny_en_against_transformers(tiny: Whisper) -> None:
    assert tiny.alignment_heads[0] == (1, 0) and 220 in tiny.begin_suppress and not tiny.tokens.multilingual
    check_against(tiny, tiny_hf(), [50257, 50362, *tiny.tokenizer.encode(" Hello, world. How are you?")])


def test_either_attention_of_the_encoder(small: tuple[Whisper, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and torch's, of which the machine decides."""
    model, _ = small
    mel = model.log_mel([speech_like(3.0), speech_like(1.0, 5)])
    found = []
    for ops in (cpu_ops(), None):
        monkeypatch.setattr(attention, "cpu_ops", lambda ops=ops: ops)
        found.append(model.encode(mel))
    assert worst(*found) <= 1e-4


def test_cached_is_whole(small: tuple[Whisper, Any]) -> None:
    model, _ = small
    features = model.encode(model.log_mel([speech_like(2.0)]))
    ids = [50257, 5, 600, 7, 40000, 3, 2]
    whole = decode_all(model, features, ids)
    cache = model.new_cache(1)
    model.set_audio(cache, [0], features)
    parts = [model.decode(ids[:3], [0] * 3, range(3), cache)]
    parts += [model.decode([ids[at]], [0], [at], cache) for at in range(3, len(ids))]
    assert worst(torch.cat(parts), whole) <= 1e-5


def test_batched_is_alone(small: tuple[Whisper, Any]) -> None:
    """Prompts and single tokens of several slots in one call, over windows of different loudness and length."""
    model, _ = small
    mel = model.log_mel([speech_like(1.0), speech_like(9.0, 1) * 3, torch.zeros(0)])
    features = model.encode(mel)
    for at, clip in enumerate([speech_like(1.0), speech_like(9.0, 1) * 3, torch.zeros(0)]):
        assert torch.equal(model.log_mel([clip])[0], mel[at])
        assert torch.equal(model.encode(mel[at : at + 1])[0], features[at])
    texts = [[50257, 9], [50257, 1, 2, 3, 4], [50257]]
    alone = [decode_all(model, features[at : at + 1], ids) for at, ids in enumerate(texts)]
    cache = model.new_cache(4)
    model.set_audio(cache, [3, 0, 2], features)
    slots = [3, 0, 2]
    model.decode([50257], [3], [0], cache)
    mixed = model.decode([9, *texts[1], 50257], [3] + [0] * 5 + [2], [1, *range(5), 0], cache)
    assert worst(mixed, torch.cat([alone[0][1:], alone[1], alone[2]])) <= 1e-5
    assert slots == [3, 0, 2]


def test_windows_cut_short(small: tuple[Whisper, Any]) -> None:
    """Against transformers' layers on as many positions; a slot that held a whole window does not show it."""
    model, hf = small
    mel = model.log_mel([speech_like(2.0)])
    features = model.encode(mel[:, :, :600])
    encoder = hf.model.encoder
    with torch.no_grad():
        x = torch.nn.functional.gelu(encoder.conv1(mel[:, :, :600]))
        x = torch.nn.functional.gelu(encoder.conv2(x)).transpose(1, 2) + encoder.embed_positions.weight[:300]
        for layer in encoder.layers:
            out = layer(x, attention_mask=None)
            x = out[0] if isinstance(out, tuple) else out
        expected = encoder.layer_norm(x)
        logits = hf(encoder_outputs=(expected,), decoder_input_ids=torch.tensor([[50257, 5, 6]])).logits[0]
    assert features.shape == (1, 300, 64) and worst(features, expected) <= TOLERANCE
    cache = model.new_cache(2)
    model.set_audio(cache, [0, 1], model.encode(model.log_mel([speech_like(9.0), speech_like(9.0)])))
    model.set_audio(cache, [1], features)
    assert cache.audio_length == [1500, 300]
    hidden = model.decode([50257, 5, 6], [1] * 3, range(3), cache)
    assert worst(model.logits(hidden), logits) <= TOLERANCE
    assert model.alignment(cache, 1, 3, 1500).shape == (len(model.alignment_heads), 3, 300)


def test_invariant_rows_are_exactly_equal(tmp_path: Path) -> None:
    """In any company: alone, among 40 others, cached or in a prompt. (Plain torch attention promises less.)"""
    same = torch.equal if cpu_ops() is not None else functools.partial(torch.allclose, atol=1e-5)
    save_small(tmp_path)
    model = load_whisper(tmp_path, invariant=True)
    features = model.encode(model.log_mel([speech_like(2.0)]))
    ids = [50257, *range(300, 319)]
    alone = decode_all(model, features, ids)
    cache = model.new_cache(3, num_audio=1)
    model.set_audio(cache, [0], features)
    model.decode(ids[:5] * 3, [0] * 5 + [1] * 5 + [2] * 5, [*range(5)] * 3, cache)
    mixed = model.decode(
        ids[5:] + [7] * 25 + [ids[5]], [0] * 15 + [1] * 25 + [2], [*range(5, 20), *range(5, 30), 5], cache
    )
    assert same(mixed[:15], alone[5:]) and same(mixed[-1], alone[5])
    assert same(model.logits(mixed)[:15], model.logits(alone)[5:])


def test_beams_share_a_window(small: tuple[Whisper, Any]) -> None:
    model, _ = small
    features = model.encode(model.log_mel([speech_like(2.0), speech_like(2.0, 4)]))
    cache = model.new_cache(4, num_audio=2)
    model.set_audio(cache, [0, 1], features)
    cache.audio_slot[:] = [0, 1, 0, 1]
    start = [50257, 8, 21]
    model.decode(start, [1] * 3, range(3), cache)
    model.copy_slots(cache, [1, 1], [0, 2], 3)
    assert cache.audio_slot == [1, 1, 1, 1]
    hidden = model.decode([100, 200, 300], [0, 1, 2], [3] * 3, cache)
    for row, token in enumerate([100, 200, 300]):
        assert worst(hidden[row], decode_all(model, features[1:], [*start, token])[-1]) <= 1e-5
    assert torch.equal(cache.queries[0, :3], cache.queries[1, :3])
    # Slots change places: all is read before anything is written.
    model.copy_slots(cache, [1, 0], [0, 1], 4)
    after = model.decode([5, 5], [0, 1], [4, 4], cache)
    assert worst(after[0], decode_all(model, features[1:], [*start, 200, 5])[-1]) <= 1e-5
    assert worst(after[1], decode_all(model, features[1:], [*start, 100, 5])[-1]) <= 1e-5


def test_a_used_slot_forgets(small: tuple[Whisper, Any]) -> None:
    """What an earlier transcript left above a slot's length never shows, not even NaN."""
    model, _ = small
    features = model.encode(model.log_mel([speech_like(2.0)]))
    clean = decode_all(model, features, [50257, 3])
    cache = model.new_cache(1)
    for kv in cache.self_kv:
        kv.fill_(float("nan"))
    model.set_audio(cache, [0], features)
    assert torch.equal(model.decode([50257, 3], [0, 0], [0, 1], cache), clean)


def test_bad_calls(small: tuple[Whisper, Any]) -> None:
    model, _ = small
    cache = model.new_cache(2)
    for slots, positions in ([[0], [448]], [[2], [0]], [[-1], [0]], [[0], []], [[0, 1, 0], [0, 0, 1]]):
        with pytest.raises(ValueError, match="expected"):
            model.decode([1] * len(slots), slots, positions, cache)
    for shape in ((1, 80, 101), (1, 80, 3002), (1, 79, 3000), (80, 3000), (1, 80, 0), (0, 80, 3000)):
        with pytest.raises(ValueError, match="expected mel"):
            model.encode(torch.zeros(shape))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_bfloat16_stays_close(tiny: Whisper, quantize: Any) -> None:
    """The next token's log-probabilities of real weights, in the cheap types."""
    model = load_whisper(TINY, dtype=torch.bfloat16, quantize=quantize)
    ids = [50257, 50362, *tiny.tokenizer.encode(" Hello, world. How are")]
    mel = tiny.log_mel([speech_like(3.0)])
    wide = tiny.logits(decode_all(tiny, tiny.encode(mel), ids)).softmax(-1)
    near = model.logits(decode_all(model, model.encode(mel), ids)).softmax(-1)
    assert near.dtype == torch.float32 and worst(near, wide) < 0.1


def test_unusable_directories(tmp_path: Path) -> None:
    hf = save_small(tmp_path)
    with pytest.raises(ModelLoadError, match="no config.json"):
        load_whisper(tmp_path / "sub") if (tmp_path / "sub").mkdir() is None else None
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"decoder_layers": 3', '"decoder_layers": 4'))
    with pytest.raises(ModelLoadError, match="missing"):
        load_whisper(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"d_model": 64', '"d_model": 128'))
    with pytest.raises(ModelLoadError, match="expected shape"):
        load_whisper(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 51864', '"vocab_size": 1000'))
    with pytest.raises(ModelLoadError, match="vocab_size"):
        load_whisper(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"d_model": 64', '"d_model": "x"'))
    with pytest.raises(ModelLoadError, match="whole number"):
        load_whisper(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_whisper(tmp_path)
    assert hf is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_windows_give_nearly_the_same(dtype: torch.dtype) -> None:
    """Keys and values of windows in int8: hidden rows and alignment move little, a cut window's rest is never read."""
    model = load_whisper(TINY, dtype=dtype)
    features = model.encode(model.log_mel([speech_like(6.0)]))[:, :900]
    ids = [*model.tokens.prompt(), 400, 1029, 2068]
    plain, int8 = model.new_cache(2), model.new_cache(2, cross_int8=True)
    assert int8.num_bytes < plain.num_bytes and int8.cross_kv[0].dtype is torch.int8
    hidden = []
    for cache in (plain, int8):
        for kv in cache.cross_kv:
            kv[1] = quantize_rows(torch.full((*kv.shape[1:4], 64), torch.nan)) if cache is int8 else torch.nan
        model.set_audio(cache, [1], features)
        hidden.append(model.decode(ids, [1] * len(ids), range(len(ids)), cache).float())
    assert worst(*hidden) <= 0.03 * float(hidden[0].abs().max())
    maps = [model.alignment(cache, 1, len(ids), 900) for cache in (plain, int8)]
    assert bool(maps[1].isfinite().all()) and worst(*maps) <= 0.05

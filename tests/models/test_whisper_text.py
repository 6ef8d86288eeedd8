"""Tokens, tokenizer and log-mel of Whisper against transformers and known facts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.models.registry import resolve
from motet.models.whisper_config import WhisperConfig, read_rules
from motet.models.whisper_mel import LogMel
from motet.models.whisper_tokenizer import WhisperTokenizer, load_whisper_tokenizer
from motet.models.whisper_tokens import WhisperTokens, known_alignment_heads

from .whisper_models import TINY, speech_like

BASE = resolve("whisper-base").path
ENGLISH, MANY = WhisperTokens.of_vocabulary(51864), WhisperTokens.of_vocabulary(51865)


@pytest.fixture(scope="module")
def english() -> WhisperTokenizer:
    return load_whisper_tokenizer(TINY, ENGLISH)


@pytest.fixture(scope="module")
def many() -> WhisperTokenizer:
    return load_whisper_tokenizer(BASE, MANY)


@pytest.mark.parametrize(
    ("size", "ids"),
    [
        (51864, (50256, 50257, 50258, 50357, 50358, 50359, 50360, 50361, 50362, 50363)),
        (51865, (50257, 50258, 50259, 50358, 50359, 50360, 50361, 50362, 50363, 50364)),
        (51866, (50257, 50258, 50259, 50359, 50360, 50361, 50362, 50363, 50364, 50365)),
    ],
)
def test_token_tables(size: int, ids: tuple[int, ...]) -> None:
    t = WhisperTokens.of_vocabulary(size)
    assert ids == (
        t.eot, t.sot, t.languages["en"], t.translate, t.transcribe, t.startoflm, t.startofprev, t.no_speech,
        t.no_timestamps, t.timestamp_begin,
    )  # fmt: skip
    assert t.timestamp_end == size and t.multilingual == (size != 51864) and ("yue" in t.languages) == (size == 51866)


@pytest.mark.parametrize(("folder", "tokens"), [(TINY, ENGLISH), (BASE, MANY)])
def test_the_tokenizer_files_agree_with_the_table(folder: Path, tokens: WhisperTokens) -> None:
    added = {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    added.setdefault("<|he|>", added.get("<|iw|>"))  # the English file has Hebrew's older code
    assert {f"<|{code}|>": index for code, index in tokens.languages.items()}.items() <= added.items()
    names = {"endoftext": tokens.eot, "startoftranscript": tokens.sot, "translate": tokens.translate}
    names |= {"transcribe": tokens.transcribe, "startofprev": tokens.startofprev, "startoflm": tokens.startoflm}
    names |= {"notimestamps": tokens.no_timestamps}
    assert {f"<|{name}|>": index for name, index in names.items()}.items() <= added.items()


def test_prompts() -> None:
    assert ENGLISH.prompt() == [50257] and ENGLISH.prompt(timestamps=False) == [50257, 50362]
    assert MANY.prompt("de", translate=True) == [50258, 50261, 50358]
    with pytest.raises(ModelLoadError, match="vocab_size"):
        WhisperTokens.of_vocabulary(51863)


def test_suppression_is_the_reference_list(english: WhisperTokenizer, many: WhisperTokenizer) -> None:
    """What the tokenizer derives is what OpenAI's files list, but for the specials."""
    for tokenizer, folder, tokens in ((english, TINY, ENGLISH), (many, BASE, MANY)):
        listed = json.loads((folder / "config.json").read_text())["suppress_ids"]
        assert tokenizer.non_speech_tokens() == tuple(i for i in listed if i < tokens.eot)
        assert tokenizer.encode(" ") == [220]


def test_rules_from_files_and_tables(tmp_path: Path) -> None:
    config = WhisperConfig(
        num_mels=80, hidden=384, heads=6, layers=4, encoder_heads=6, encoder_layers=4, decoder_ffn=4, encoder_ffn=4,
        vocab_size=51864,
    )  # fmt: skip
    rules = read_rules(tmp_path, config, ENGLISH, [1, 2], [220])
    assert rules.suppress_tokens[:3] == (1, 2, 50257) and rules.begin_suppress == (220, 50256)
    assert list(rules.alignment_heads) == known_alignment_heads(4, 6, 51864)
    (tmp_path / "config.json").write_text(json.dumps({"suppress_tokens": [5], "alignment_heads": [[0, 1]]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [-1, 9]}))
    rules = read_rules(tmp_path, config, ENGLISH, [1, 2], [220])
    assert rules.suppress_tokens[:3] == (1, 2, 9) and rules.alignment_heads == ((0, 1),)
    for bad in (
        {"suppress_tokens": [51864]},
        {"suppress_tokens": "x"},
        {"alignment_heads": [[4, 0]]},
        {"alignment_heads": 3},
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(bad))
        with pytest.raises(ModelLoadError):
            read_rules(tmp_path, config, ENGLISH, [], [])


def test_known_heads() -> None:
    assert known_alignment_heads(32, 20, 51866)[0] == (7, 0) and known_alignment_heads(4, 20, 51866)[0] == (2, 4)
    assert known_alignment_heads(2, 2, 51865) == [(1, 0), (1, 1)]


TEXTS = [
    "Hello, world.",
    " It's 1,000 dollars!",
    "naïve café",
    "日本語のテスト",
    "🙂🙃 ok",
    "<|endoftext|> no",
    " x\n\ny  z",
]


def test_text_round_trips(english: WhisperTokenizer, many: WhisperTokenizer) -> None:
    for text in TEXTS:
        for tokenizer, tokens in ((english, ENGLISH), (many, MANY)):
            ids = tokenizer.encode(text)
            assert max(ids) < tokens.eot and tokenizer.decode(ids) == text
            assert tokenizer.decode([tokens.sot, tokens.timestamp_begin, *ids, tokens.eot]) == text
    assert english.decode_with_timestamps([50363, *english.encode(" Hi"), 50363 + 54, 50256]) == "<|0.00|> Hi<|1.08|>"


def test_tokenizer_from_a_vocabulary_alone(tmp_path: Path, english: WhisperTokenizer, many: WhisperTokenizer) -> None:
    """Old CTranslate2 directories hold no tokenizer.json: the merges follow from the order of the pieces."""
    for whole, folder, file, tokens in (
        (english, TINY, "vocabulary.txt", ENGLISH),
        (many, BASE, "vocabulary.json", MANY),
    ):
        alone = tmp_path / file.split(".")[1]
        alone.mkdir()
        shutil.copy(folder / file, alone / file)
        found = load_whisper_tokenizer(alone, tokens)
        for text in [*TEXTS, "Antidisestablishmentarianism, don't you think? It'll be 3.14159 or ÄÖÜ ß — «quoted»."]:
            assert found.encode(text) == whole.encode(text)
            assert found.decode(whole.encode(text)) == text
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "vocabulary.json").write_text("[1]")
    for folder in (tmp_path / "bad", tmp_path):
        with pytest.raises(ModelLoadError):
            load_whisper_tokenizer(folder, MANY)


def test_words(english: WhisperTokenizer, many: WhisperTokenizer) -> None:
    def words(tokenizer: WhisperTokenizer, text: str, language: str = "en") -> list[str]:
        ids = tokenizer.encode(text)
        found, groups = tokenizer.split_to_words(ids, language)
        assert [index for group in groups for index in group] == ids
        assert [tokenizer.decode(group) for group in groups] == found
        return found

    assert words(english, " Don't stop, antidisestablishmentarianism!") == [
        " Don't", " stop", ",", " antidisestablishmentarianism", "!",
    ]  # fmt: skip
    assert "".join(words(many, "今日は良い天気です。", "ja")) == "今日は良い天気です。"
    assert len(words(many, "今日は良い天気です。", "ja")) > 4
    assert words(many, " naïve 🙂 ok") == [" naïve", " 🙂", " ok"]
    ids = [MANY.timestamp_begin, *many.encode(" Hi there"), MANY.timestamp_begin + 5]
    assert many.split_to_words(ids)[0] == ["", " Hi", " there", ""]
    cut = many.encode(" 🙂")[:-1]
    assert many.split_to_words(cut)[1] == [cut]  # a broken character at the end stays one word
    assert many.split_to_words([]) == ([], [])


def test_words_are_those_of_transformers(many: WhisperTokenizer) -> None:
    from transformers import WhisperTokenizerFast
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    theirs = WhisperTokenizerFast(tokenizer_file=str(BASE / "tokenizer.json"))
    for text, code, name in [
        (" The quick, brown fox (aged 7) can't... naïve café — ok?", "en", "english"),
        ("今日は🙂良い天気です。", "ja", "japanese"),
    ]:
        ids = many.encode(text)
        expected, groups, _ = _combine_tokens_into_words(
            theirs, ids, language=name, prepend_punctuations="", append_punctuations=""
        )
        assert many.split_to_words(ids, code) == (expected, groups)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_log_mel_against_transformers(num_mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    theirs = WhisperFeatureExtractor(feature_size=num_mels)
    ours = LogMel(num_mels)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(480_000, generator=generator) * 0.1
    for clip in (
        speech_like(3.3),
        noise,
        noise[:479_900],
        noise[:150],
        speech_like(29.99),
        torch.zeros(16_000),
        noise[:1],
    ):
        expected = torch.from_numpy(theirs(clip.numpy(), sampling_rate=16_000, return_tensors="np").input_features)
        found = ours([clip])
        assert found.shape == (1, num_mels, 3000) and found.dtype == torch.float32
        assert float((found - expected).abs().max()) <= 2e-4


def test_log_mel_windows_are_independent() -> None:
    ours = LogMel(80)
    clips = [speech_like(1.0), torch.zeros(0), 5 * speech_like(29.9, 1), torch.ones(500_000)]
    together = ours(clips)
    for at, clip in enumerate(clips):
        assert torch.equal(together[at], ours([clip])[0])
    assert torch.equal(ours([clips[3][:480_000]])[0], together[3])
    assert ours([]).shape == (0, 80, 3000)
    assert np.isclose(float(together[1].max()), -1.5)

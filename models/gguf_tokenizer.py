"""From a GGUF's metadata to a `tokenizers.Tokenizer`: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) but does not hold it; `PRE_TOKENIZERS` is the table of what the
names mean. A name that is not in the table is refused, because a wrong one gives ids that look right and are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ..engine.errors import ModelLoadError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_MAX_PIECE_CHARS = 512  # a longer piece is no word; deriving merges costs its length

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % ((_CONTRACTIONS + "?",) * 2) + r"|\p{N}{1,3}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)

# Name -> regular expressions, applied one after the other: each cuts what the ones before left, matches and gaps alike.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "jais", "trillion", "granite-docling", "modern-bert"), (_GPT2,)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "falcon3", "pixtral", "lfm2"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "grok-2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}
_IGNORE_MERGES = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"))
_BOS_BY_DEFAULT = frozenset(("llama-bpe", "llama3", "llama-v3", "tekken"))
_NFC = frozenset(("qwen2", "qwen35", "deepseek-r1-qwen"))


def backend_from_metadata(metadata: Mapping[str, Any], name: str) -> Backend:
    """Build the tokenizer; `name` goes into errors. Control tokens are special added tokens. Raises ModelLoadError."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokens", name)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{name}: {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, name)
    elif kind == "llama":
        backend = _scored(metadata, tokens, types, name)
    else:
        raise ModelLoadError(f"{name}: tokenizer {kind!r} is not supported; expected 'gpt2' or 'llama'")
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type in zip(tokens, types, strict=True)
            if type in (_UNKNOWN, _CONTROL)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, type in zip(tokens, types, strict=True)
            if type == _USER_DEFINED
        ]
    )
    if backend.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ModelLoadError(f"{name}: the vocabulary has {len(tokens)} tokens, some of them twice")
    _add_ends(backend, metadata, tokens, kind, name)
    return backend


def _list(metadata: Mapping[str, Any], key: str, name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise ModelLoadError(f"{name}: tokenizer.ggml.{key} is missing")
    return value


def _vocab(tokens: list[str], name: str) -> dict[str, int]:
    if not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"{name}: tokenizer.ggml.tokens holds something that is not text")
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        raise ModelLoadError(f"{name}: the vocabulary holds tokens that are not UTF-8") from None
    return vocab


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], name: str) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelLoadError(f"{name}: pre-tokenizer {pre!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    merges = [_halves(merge, name) for merge in _list(metadata, "merges", name)]
    try:
        model = models.BPE(vocab=_vocab(tokens, name), merges=merges, ignore_merges=pre in _IGNORE_MERGES)
    except Exception as error:  # the library raises plain Exception, with a message about the pair
        raise ModelLoadError(f"{name}: the merges do not fit the vocabulary ({str(error)[:100]})") from None
    backend = Backend(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _halves(merge: Any, name: str) -> tuple[str, str]:
    halves = str(merge).split(" ")  # byte-level pieces hold no spaces
    if len(halves) != 2:
        raise ModelLoadError(f"{name}: a merge is not two pieces")
    return halves[0], halves[1]


def _scored(metadata: Mapping[str, Any], tokens: list[str], types: list[int], name: str) -> Backend:
    """SentencePiece BPE: the best scored pair of neighbours is joined first, so scores give the order of merges."""
    scores = _list(metadata, "scores", name)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{name}: {len(tokens)} tokens but {len(scores)} scores")
    vocab = _vocab(tokens, name)
    joinable = {token for token, type in zip(tokens, types, strict=True) if type in (_NORMAL, _UNUSED)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, type, score in zip(tokens, types, scores, strict=True):
        if type != _NORMAL or not 1 < len(token) <= _MAX_PIECE_CHARS:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in joinable and right in joinable:
                merges.append((-float(score), vocab[left], vocab[right], (left, right)))
    merges.sort(key=lambda merge: merge[:3])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    has_bytes = sum(type == _BYTE for type in types) >= 256
    try:
        model = models.BPE(
            vocab=vocab,
            merges=[merge for *_, merge in merges],
            fuse_unk=True,
            byte_fallback=has_bytes,
            unk_token=tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None,
        )
    except Exception as error:
        raise ModelLoadError(f"{name}: the scores do not give merges ({str(error)[:100]})") from None
    backend = Backend(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _add_ends(backend: Backend, metadata: Mapping[str, Any], tokens: list[str], kind: str, name: str) -> None:
    """Begin and end tokens that `encode(add_special_tokens=True)` puts around a text."""
    default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    template, specials = ["$A"], []
    for key, wanted, at in (("bos", default, 0), ("eos", False, 1)):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{key}_token", wanted) or index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelLoadError(f"{name}: tokenizer.ggml.{key}_token_id is {index!r}, there are {len(tokens)} tokens")
        template.insert(at * len(template), tokens[index])
        specials.append((tokens[index], index))
    if specials:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)

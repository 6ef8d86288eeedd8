"""Text to ids and back, from `tokenizer.json` or from a GGUF's metadata. Torch-free and transformers-free.

Users' text never becomes special tokens: `encode` reads "<|im_end|>" as the ten characters it is, unless the caller
says `parse_special=True`, and `encode_prompt` reads as special only what the chat template wrote.

Decoding is by bytes where the vocabulary allows it (byte-level BPE, SentencePiece with byte pieces): the bytes of the
tokens one after the other, read as UTF-8 with U+FFFD for what is not. So any cut of a stream gives the same text as the
whole. Other vocabularies are decoded through a window over the last tokens.

Does not know models, requests or stop strings.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from ..engine.errors import InvalidRequest, ModelLoadError
from .chat_template import ChatTemplate, RenderedPrompt, spelling_pattern
from .gguf import GGUFFile
from .gguf_tokenizer import backend_from_metadata

_MAX_JSON_BYTES = 256 << 20
_SPACE_MARK = "▁"


class Tokenizer:
    """A model's tokenizer. Immutable; every method may be called from several threads.

    `vocab_size` counts ids the tokenizer knows (0..vocab_size-1); the model's own may be larger (padding).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        template: str | None = None,
        variables: Mapping[str, str] | None = None,
        name: str = "tokenizer",
    ) -> None:
        """`backend` parses special tokens in text. `template` and `variables` (bos_token...) make the chat template."""
        self._backend = backend
        self._plain = _without_special(backend)
        self._ends = _ends_of(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._special_ids = {self._added[index]: index for index in self._special}
        self._spelling = spelling_pattern(list(self._special_ids))
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self._to_bytes = _byte_reader(backend)
        self._bytes: dict[int, bytes] = {}
        self._longest: int | None = None
        self.chat_template = (
            None
            if template is None
            else ChatTemplate(
                template, special_texts=list(self._special_ids), variables=variables, name=f"{name}: chat template"
            )
        )

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    @property
    def is_byte_exact(self) -> bool:
        """True when tokens are byte strings whose concatenation is the text."""
        return self._to_bytes is not None

    # ------------------------------------------------------------------------------------------------------- encoding

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text. `add_special_tokens` puts the model's begin token (if it has one) in front.

        Raises InvalidRequest for text that is not valid Unicode (lone surrogates).
        """
        _check_unicode(text)
        if parse_special:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._encode_plain(text, add_special_tokens)

    def encode_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """Ids of a rendered chat: special tokens where the template wrote them, plain text where users spelled them."""
        _check_unicode(prompt.marked)
        if not prompt.number:
            return self._backend.encode(prompt.text, add_special_tokens=False).ids
        ids: list[int] = []
        for part, special in prompt.parts(self._split):
            ids.extend([self._special_ids[part]] if special else self._encode_plain(part, False))
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render and encode; `options` are those of `ChatTemplate.render`. Raises InvalidRequest without a template."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead of messages", param="messages")
        return self.encode_prompt(self.chat_template.render(messages, **options))

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._spelling is not None and not self._special.isdisjoint(ids) and self._spelling.search(text):
            # The vocabulary itself has the spelling as a piece (Unigram); encode its halves apart.
            ids = [
                index for half in self._halves(text) for index in self._plain.encode(half, add_special_tokens=False).ids
            ]
            unknown = self._unknown_id()
            ids = [index for index in ids if index not in self._special or index == unknown]
        if not add_special_tokens:
            return ids
        return self._ends[0] + ids + self._ends[1]

    def _unknown_id(self) -> int | None:
        token = getattr(self._backend.model, "unk_token", None)
        return self._backend.token_to_id(token) if token else None

    def _halves(self, text: str) -> list[str]:
        assert self._spelling is not None
        cuts = [0, *((match.start() + match.end() + 1) // 2 for match in self._spelling.finditer(text)), len(text)]
        return [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False) if start < end]

    def _split(self, text: str) -> list[tuple[str, bool]]:
        """Cut at special-token spellings: (text, is_special)."""
        assert self._spelling is not None
        out, at = [], 0
        for match in self._spelling.finditer(text):
            out.append((text[at : match.start()], False))
            out.append((match.group(), True))
            at = match.end()
        out.append((text[at:], False))
        return [(part, special) for part, special in out if part]

    # ------------------------------------------------------------------------------------------------------- decoding

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; b"" for an id the tokenizer does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return b""
        return self._to_bytes(piece) if self._to_bytes is not None else piece.encode()

    def token_text(self, token_id: int) -> str:
        """A token alone, for display; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, as a continuation: a leading space stays. Unknown ids give nothing."""
        decoder = self.incremental(skip_special_tokens=skip_special_tokens)
        return decoder.feed(token_ids) + decoder.flush()

    def incremental(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one stream."""
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)

    def longest_token_bytes(self) -> int:
        """An upper bound of a token's bytes: a text with more than n times as many has more than n tokens."""
        if self._longest is None:
            # A byte-level piece has one character per byte; other pieces at most four bytes per character.
            width = 1 if self._to_bytes is _byte_level_bytes else 4
            self._longest = max((len(piece) for piece in self._backend.get_vocab()), default=1) * width
        return self._longest


class IncrementalDecoder:
    """Ids in, text out, for one stream. `feed` holds back an unfinished character; `flush` gives what is left."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Window of the other kind: ids[prefix:] are decoded, text up to ids[:read] is out.
        self._ids: list[int] = []
        self._read = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids; cost does not grow with the length of the stream."""
        ids = [token_id for token_id in token_ids if token_id not in self._skip]
        if self._tokenizer.is_byte_exact:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))
        return "".join(self._feed_window(token_id) for token_id in ids)

    def flush(self) -> str:
        """The rest: an unfinished character becomes U+FFFD. The decoder is as new afterwards."""
        if self._tokenizer.is_byte_exact:
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return text
        text = self._window(self._ids)[len(self._window(self._ids[: self._read])) :]
        self._ids, self._read = [], 0
        return text

    def _feed_window(self, token_id: int) -> str:
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        before, now = self._window(self._ids[: self._read]), self._window(self._ids)
        if now.endswith("\ufffd") and len(self._ids) - self._read < 8 or len(now) <= len(before):
            return ""
        # Keep the last token that was read as context: joining rules (spaces, apostrophes) look one token back.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return now[len(before) :]

    def _window(self, ids: list[int]) -> str:
        return self._tokenizer._backend.decode(ids, skip_special_tokens=False) if ids else ""


def _without_special(backend: Backend) -> Backend:
    """A second backend over the same vocabulary that does not look for special tokens in text."""
    plain = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    plain.add_tokens([added[index] for index in sorted(added)])
    if plain.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps: copy the long way
        plain = Backend.from_str(backend.to_str())
    plain.encode_special_tokens = True
    return plain


def _ends_of(backend: Backend) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    marks = encoding.special_tokens_mask
    first = next((at for at, mark in enumerate(marks) if not mark), len(marks))
    last = len(marks) - next((at for at, mark in enumerate(reversed(marks)) if not mark), 0)
    return encoding.ids[:first], encoding.ids[last:]


# ------------------------------------------------------------------------------------------------------------- bytes


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's printable stand-ins for byte values: printable Latin-1 is itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    hidden = (value for value in range(256) if chr(value) not in table)
    return {**table, **{chr(0x100 + at): value for at, value in enumerate(hidden)}}


_BYTE_OF = _gpt2_bytes()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes((int(piece[3:5], 16),))
        except ValueError:
            pass
    return piece.replace(_SPACE_MARK, " ").encode()


def _byte_reader(backend: Backend) -> Callable[[str], bytes] | None:
    """How a piece is read as bytes, from the decoder's description; None where only the library can decode."""
    if backend.decoder is None:
        return None
    described = json.loads(backend.decoder.__getstate__())
    steps = described.get("decoders", [described])
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"ByteFallback", "Metaspace"}:
        marks = [step for step in steps if step.get("type") == "Replace"]
        return _sentencepiece_bytes if all(step["content"] == " " for step in marks) else None
    return None


def _check_unicode(text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"expected text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None


# ----------------------------------------------------------------------------------------------------------- loading


def load_tokenizer(path: Path | str) -> Tokenizer:
    """From a `.gguf` file or a directory with `tokenizer.json` or with one `.gguf`. Raises ModelLoadError."""
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return tokenizer_from_metadata(GGUFFile(path).metadata, path.name)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _from_directory(path)
    if path.is_dir() and len(found := sorted(path.glob("*.gguf"))) == 1:
        return load_tokenizer(found[0])
    raise ModelLoadError(f"{path.name}: no tokenizer; expected tokenizer.json in a directory, or a .gguf file")


def tokenizer_from_metadata(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """From a GGUF's key-value pairs. Raises ModelLoadError."""
    backend = backend_from_metadata(metadata, name)
    tokens = metadata["tokenizer.ggml.tokens"]

    def index(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos = index("bos")
    ends = [value for key in ("eos", "eot", "eom") if (value := index(key)) is not None]
    variables = {
        f"{key}_token": tokens[value]
        for key in ("bos", "eos", "unk", "pad")
        if (value := index({"unk": "unknown", "pad": "padding"}.get(key, key))) is not None
    }
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_token_ids=ends,
        bos_token_id=bos,
        variables=variables,
        name=name,
        template=template if isinstance(template, str) else None,
    )


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise ModelLoadError(f"{path.name}: tokenizer.json is larger than {_MAX_JSON_BYTES} bytes")
    try:
        backend = Backend.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{path.name}: tokenizer.json cannot be read ({str(error)[:200]})") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    variables = {
        key: text
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(config.get(key))) is not None
    }
    ends: list[int] = []
    for source in (_read_json(path / "generation_config.json"), _read_json(path / "config.json")):
        value = source.get("eos_token_id")
        ends.extend(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    if "eos_token" in variables and (index := backend.token_to_id(variables["eos_token"])) is not None:
        ends.append(index)
    bos = backend.token_to_id(variables["bos_token"]) if "bos_token" in variables else None
    return Tokenizer(
        backend,
        eos_token_ids=ends,
        bos_token_id=bos,
        template=_find_template(path, config),
        variables=variables,
        name=path.name,
    )


def _find_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.parent.name}: {path.name} is not JSON ({str(error)[:100]})") from None
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

"""Typed text to plain text: one alphabet, no marks of layout. The first step of models/speech_text.py.

Takes any string. Unicode is folded to ASCII and a few signs that are spoken (currencies, degrees); accents go, emoji and
control characters too, and letters of other alphabets (a voice of English letters cannot say them). Of Markdown and HTML
the words stay; links keep their text, addresses are read the way people read them out.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from .spoken_numbers import number, year

# Beyond ASCII, what later steps know how to say.
KEPT = frozenset("€£¥₹₩₽¢°×÷±§©√∞≈≠≤≥µ‰")
_FOLDED = {
    **{
        "ß": "ss",
        "ẞ": "SS",
        "æ": "ae",
        "Æ": "AE",
        "ø": "o",
        "Ø": "O",
        "ł": "l",
        "Ł": "L",
        "đ": "d",
        "Đ": "D",
        "þ": "th",
    },
    **{
        "Þ": "Th",
        "ð": "d",
        "Ð": "D",
        "œ": "oe",
        "Œ": "OE",
        "ı": "i",
        "ħ": "h",
        "ŋ": "ng",
        "‘": "'",
        "’": "'",
        "‚": "'",
    },
    **{"ʼ": "'", "′": "'", "″": '"', "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "−": "-", "⁄": "/", "∕": "/"},
    **{"–": " - ", "—": " -- ", "―": " -- ", "‐": "-", "‑": "-", "‒": "-", "•": "* ", "‣": "* ", "·": " ", "…": "..."},
    **{
        "。": ". ",
        "！": "! ",
        "？": "? ",
        "，": ", ",
        "、": ", ",
        "；": "; ",
        "：": ": ",
        "¿": " ",
        "¡": " ",
        "μ": "µ",
    },
    **{
        "\n": "\n",
        "\r": "\n",
        "\u2028": "\n",
        "\u2029": "\n\n",
        "\u00ad": "",
        "\u200b": "",
        "\u200d": "",
        "\ufe0f": "",
    },
    **{"π": " pi ", "α": " alpha ", "β": " beta ", "γ": " gamma ", "δ": " delta ", "λ": " lambda ", "θ": " theta "},
    **{"σ": " sigma ", "ω": " omega ", "Ω": " ohms ", "Δ": " delta ", "Σ": " sum ", "→": ", ", "←": ", ", "℃": "°C"},
    **{"℉": "°F", "²": "^2", "³": "^3", "№": " No. ", "™": "", "®": "", "℠": "", "ª": "", "º": "", "`": "`", "×": "×"},
}
_ENDINGS = frozenset("com org net io ai dev edu gov info app me tv uk us de fr ca au eu co xyz tech".split())
_SPELLED_ENDINGS = frozenset("io ai tv uk us de eu".split())

_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\([^()\s]{0,500}(?:\s\"[^\"\n]{0,200}\")?\)")
_FENCE = re.compile(r"```[\w+-]{0,20}")
_RULE = re.compile(r"^[ \t]{0,20}(?:[-*_=][ \t]{0,3}){3,}$", re.M)
_LEAD = re.compile(r"^[ \t]{0,40}(?:#{1,6}|>{1,5}|[-*+])[ \t]+", re.M)
_NUMBERED = re.compile(r"^[ \t]{0,40}(\d{1,3})[.)][ \t]+(?=\S)", re.M)
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,200}>")
_CODES = re.compile(r"&(amp|lt|gt|quot|nbsp|apos|#39);")
_EMAIL = re.compile(r"(?<![\w.+-])([\w+-]++(?:\.[\w+-]++)*+)@([A-Za-z0-9-]++(?:\.[A-Za-z0-9-]++)++)")
_ADDRESS = re.compile(
    r"(?<![\w@.-])(?:(?:https?|ftp|wss?)://(?:www\.)?([^\s<>\"',]++)|(?:www\.)?((?:[A-Za-z0-9-]++\.)++[A-Za-z]{2,4}+(?![\w@])"
    r"(?:/[^\s<>\"',]*+)?))"
)
_HASHTAG = re.compile(r"(?<![\w&])#([A-Za-z]\w{0,100})")
_MENTION = re.compile(r"(?<![\w.])@([A-Za-z]\w{0,60})")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[./\-_@+~%:=&?#]")
_SAID = {".": "dot", "/": "slash", "-": "dash", "_": "underscore", "@": "at", "+": "plus", "~": "tilde", ":": "colon"}


def plain(text: str) -> str:
    """ASCII and KEPT, without marks of layout; line breaks stay. Never raises; linear in the length."""
    text = _ascii(text)
    text = _FENCE.sub(" ", text)
    text = _RULE.sub(" ", text)
    text = _NUMBERED.sub(r"\n\1, ", _LEAD.sub("\n", text))
    text = _LINK.sub(r"\1", text)
    text = _CODES.sub(lambda found: {"amp": "&", "lt": "<", "gt": ">", "nbsp": " "}.get(found[1], "'"), text)
    text = text.replace("<=", "\u2264").replace(">=", "\u2265").replace("!=", "\u2260").replace("->", ", ")
    text = _EMAIL.sub(lambda found: f" {spell_address(found[1])} at {spell_address(found[2])} ", text)
    text = _ADDRESS.sub(_say_address, text)
    text = _TAG.sub(" ", text)
    text = _HASHTAG.sub(lambda found: f" hashtag {_words(found[1])} ", text)
    text = _MENTION.sub(lambda found: f" at {_words(found[1])} ", text)
    text = re.sub(r"(?<=\d)\s?\*\s?(?=\d)", " times ", text)
    return re.sub(r"[*`]++|~~|__", "", text).replace("|", ", ").replace("_", " ")


def tidy(text: str) -> str:
    """For voices that read any text: marks of layout, emoji and control characters go, the words stay as they are."""
    kept = "".join(map(_visible, text))
    kept = _NUMBERED.sub(r"\n\1, ", _LEAD.sub("\n", _RULE.sub(" ", _FENCE.sub(" ", kept))))
    return " ".join(re.sub(r"[*`]++|~~|__", "", _LINK.sub(r"\1", kept)).split())


def spell_address(address: str) -> str:
    """ "example.com/a-b" -> "example dot com slash a dash b"."""
    words: list[str] = []
    for part in _PARTS.findall(address[:120]):
        if part.isdigit():
            words.append(year(part) if len(part) == 4 and part[0] != "0" else number(part))
        elif part in _SAID:
            words.append(_SAID[part])
        elif part.isalpha():
            low = part.lower()
            letters = low in _SPELLED_ENDINGS if words[-1:] == ["dot"] else not re.search("[aeiouy]", low)
            words.append(" ".join(low) if letters and len(low) < 6 else low)
    return " ".join(words)


def _say_address(found: re.Match[str]) -> str:
    address = found[1] or found[2]
    if found[1] is None:
        host = address.partition("/")[0]
        if host.rpartition(".")[2].lower() not in _ENDINGS or host[:1] == "-":
            return found[0]
    bare = address.rstrip(".,;:!?)'\"")
    after = address[len(bare) :]
    bare = re.split(r"[?#]", bare, maxsplit=1)[0].rstrip("/")
    return f" {spell_address(bare)}{after} " if bare else " "


def _words(joined: str) -> str:
    """The words of a name that is written in one: "MeToo_2" -> "Me Too 2"."""
    return " ".join(part for part in _PARTS.findall(joined) if part.isalnum())


def _ascii(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_fold, text))


@lru_cache(maxsize=4096)
def _visible(char: str) -> str:
    if char in "\n\t" or char.isspace():
        return "\n" if char == "\n" else " "
    return " " if unicodedata.category(char)[0] == "C" or unicodedata.category(char) in ("So", "Sk") else char


@lru_cache(maxsize=4096)
def _fold(char: str) -> str:
    if char in _FOLDED:
        return _FOLDED[char]
    if char in KEPT or (char.isascii() and char.isprintable()):
        return char
    if char.isspace():
        return " "
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    kind = unicodedata.category(char)
    if kind[0] == "M":  # an accent that stands by itself
        return ""
    compatible = unicodedata.normalize("NFKD", char)
    if kind == "No" and "\N{FRACTION SLASH}" in compatible:
        return f" {compatible}".replace("\N{FRACTION SLASH}", "/")
    if kind[0] in "LN":
        # Of a letter with an accent the letter; what is no Latin letter even then is a gap.
        kept = "".join(_FOLDED.get(part, part if part.isascii() else "") for part in compatible)
        return kept if kept.strip() else " "
    if kind == "Pd":
        return "-"
    if kind in ("Pi", "Pf"):
        return '"'
    if kind in ("Ps", "Pe"):
        return ","
    return " "

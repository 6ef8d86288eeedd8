"""Written English to the words a voice says: "Dr. Lee paid $3 on Dec. 1" -> "doctor lee paid three dollars on december first."

`normalize` takes any string and gives only `LETTERS`. It reads numbers, dates, times, money, measures, abbreviations, Roman
numerals, addresses and acronyms as an American newsreader would, deciding by spelling and neighbours alone. It knows no
grammar: where writing is ambiguous ("3/4", "St.", "1600") it takes the more frequent reading.

The passes replace what they understand by small letters, so that none reads what an earlier one wrote. Quantifiers of the
patterns are possessive or bounded: hostile text costs no more time than any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .plain_text import plain
from .speech_words import (
    BEFORE_SOMETHING,
    COUNTED,
    COUNTED_PARTS,
    CURRENCIES,
    DAYS,
    HUMS,
    LETTER_NAMES,
    MAY_END,
    MONTHS,
    ONLY_CAPITALISED,
    ONLY_IN_CAPITALS,
    ROYAL,
    SAID_AS_LETTERS,
    SAID_AS_WORDS,
    SCALES,
    STARTERS,
    SYMBOLS,
    UNITS,
)
from .spoken_numbers import cardinal, fraction, number, ordinal, plural, roman, spelled, year

LETTERS = "abcdefghijklmnopqrstuvwxyz ',.?"
_PIECE = 1000  # characters that are read at a time
_LONGEST_WORD = 36

Match = re.Match[str]
Pass = tuple[re.Pattern[str], Callable[[Match], str]]

_N = r"(?<![\w.])(?>\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?>\.\d++)?+"  # 1,250.5
_MONTH = (
    r"(Jan(?:uary\b|\.|\b)|Feb(?:ruary\b|\.|\b)|Mar(?:ch\b|\.|\b)|Apr(?:il\b|\.|\b)|May\b|June?\b\.?|July?\b\.?|"
    r"Aug(?:ust\b|\.|\b)|Sep(?:tember\b|t\.|t\b|\.|\b)|Oct(?:ober\b|\.|\b)|Nov(?:ember\b|\.|\b)|Dec(?:ember\b|\.|\b))"
)
_HALF_DAY = r"([AaPp])(?:\.\s?[Mm]\b\.?|[Mm]\b)"
_TITLED = re.compile(r"\b[A-Z][a-z]+\s$|\d(?:st|nd|rd|th)\s$")


def normalize(text: str) -> str:
    """Text of any kind -> the words to be said, in LETTERS only; it ends in "." or "?", or is empty if nothing can be said.

    Commas, full stops and question marks of the text stay where a voice pauses. Never raises; linear in the length.
    """
    flat = plain(text)
    said = [_say(flat[start:end]) for start, end in _pieces(flat, _PIECE)]
    return _finish(" ".join(said))


def spell_letters(text: str) -> str:
    """Letters that stand alone by their names, for voices that never learned them: "p m" -> "pee em".

    "a" and "i" are words, unless they stand beside another letter.
    """
    words = text.split(" ")
    bare = [word.strip(",.?") for word in words]
    marked = [word != letters for word, letters in zip(words, bare)]

    def neighbours(left: int) -> bool:
        """Whether words `left` and the next one are letters of one name: "b i", "a i", but not "i a" or "b, i"."""
        if left < 0 or left + 1 >= len(words) or marked[left]:
            return False
        pair = bare[left], bare[left + 1]
        return len(pair[0]) == len(pair[1]) == 1 and (pair == ("a", "i") or not set(pair) <= set("aio"))

    for at, letter in enumerate(bare):
        if letter in LETTER_NAMES and (letter not in "aio" or neighbours(at - 1) or neighbours(at)):
            words[at] = words[at].replace(letter, LETTER_NAMES[letter].replace("+", " "), 1)
    return " ".join(words)


def _pieces(text: str, size: int) -> list[tuple[int, int]]:
    """Bounds of pieces of at most `size` characters, cut at spaces where there are any."""
    bounds: list[tuple[int, int]] = []
    start = 0
    while len(text) - start > size:
        space = text.rfind(" ", start + size // 2, start + size)
        end = space if space > start else start + size
        bounds.append((start, end))
        start = end
    bounds.append((start, len(text)))
    return bounds


def _say(text: str) -> str:
    shouted = _is_shouted(text)
    for pattern, replace in _PASSES:
        text = pattern.sub(replace, text)
    text = _MIXED.sub(_say_mixed, text)
    text = _DIGITS.sub(lambda found: f" {number(found[0])} ", text)
    return _WORD.sub(lambda found: _say_word(found, shouted), text)


def _finish(text: str) -> str:
    """Symbols, punctuation and case; whatever is left and cannot be said becomes a gap."""
    text = re.sub(r"(?<![.\s])\.(?:\s{0,2}\.)++\s{0,3}(?=[a-z])", ", ", text)  # an ellipsis within a sentence
    text = re.sub(r"(?<=\w)(?:-|_)(?=\w)", " ", text.lower())
    text = re.sub(r"\s-{1,3}\s|-{2,}", ", ", text)
    text = _SYMBOL.sub(lambda found: SYMBOLS[found[0]], text)
    text = re.sub(r"\s++", _one_gap, text)
    text = text.translate(_PUNCTUATION)
    text = re.sub(r"(?<![a-z])'|'(?![a-z])", " ", text)
    text = re.sub(r"[^a-z',.?]+", " ", text)
    text = re.sub(r"([a-z])\1{3,}+", r"\1\1\1", text)
    text = re.sub(rf"[a-z']{{{_LONGEST_WORD + 1},}}+", _break_word, text)
    text = re.sub(r"[\s,.?]++", _one_mark, text).strip(" ,").lstrip(".? ,")
    if not text:
        return ""
    return text if text[-1] in ".?" else f"{text}."


_SYMBOL = re.compile("[" + re.escape("".join(SYMBOLS)) + "]")
_PUNCTUATION = str.maketrans({**dict.fromkeys(";:()[]{}", ", "), "!": ".", '"': " "})


def _one_mark(found: Match) -> str:
    """Of a row of marks the strongest."""
    return next((mark for mark in "?.," if mark in found[0]), "") + " "


def _one_gap(found: Match) -> str:
    """A line break within a paragraph is a space, one between two a pause."""
    return ", " if found[0].count("\n") > 1 else " "


def _break_word(found: Match) -> str:
    word = found[0]
    return " ".join(word[at : at + _LONGEST_WORD // 2] for at in range(0, len(word), _LONGEST_WORD // 2))


# -------------------------------------------------------------------------------------------------------------- dates


def _month(name: str) -> str:
    short = name.rstrip(".").lower()[:3]
    return next(month for month in MONTHS if month.startswith(short))


def _day(digits: str) -> str | None:
    return ordinal(digits) if 1 <= int(digits) <= 31 else None


def _date(month: int, day: int, when: str) -> str | None:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    full = f"20{when}" if len(when) == 2 else when
    return f" {MONTHS[month - 1]} {ordinal(str(day))} {year(full)} "


def _iso_date(found: Match) -> str:
    clock = f" at {found[4]}" if found[4] else ""
    date = _date(int(found[2]), int(found[3]), found[1])
    return found[0] if date is None else date + clock


def _slash_date(found: Match) -> str:
    first, second = int(found[1]), int(found[2])
    month, day = (second, first) if first > 12 else (first, second)
    return _date(month, day, found[3]) or found[0]


def _dotted_date(found: Match) -> str:
    return _date(int(found[2]), int(found[1]), found[3]) or found[0]


def _month_day(found: Match) -> str:
    day = _day(found[2])
    if day is None:
        return found[0]
    when = f"{',' if ',' in (found[3] or '') else ''} {year(found[4])}" if found[4] else ""
    return f"{_month(found[1])} {day}{when}"


def _day_month(found: Match) -> str:
    day = _day(found[2])
    if day is None:
        return found[0]
    the = "" if found[1] else "the "
    when = f" {year(found[4])}" if found[4] else ""
    return f"{found[1] or ''}{the}{day} of {_month(found[3])}{when}"


# -------------------------------------------------------------------------------------------------------- times, money


def _half_day(found: Match, group: int) -> str:
    """ " p m", with the full stop that ends a sentence: it does where a capital letter follows that begins no day."""
    letter = found[group]
    if not letter:
        return ""
    rest = found.string[found.end() : found.end() + 12]
    after = rest.split()
    new = bool(re.match(r"\s+[A-Z]", rest)) and after[0].lower()[:3] not in {day[:3] for day in DAYS}
    ends = found[0].endswith(".") and new and after[0][1:2].islower()
    return f" {letter.lower()} m{'.' if ends else ''}"


def _clock(found: Match) -> str:
    hours, minutes, seconds = found[1], found[2], found[3]
    half = _half_day(found, 4)
    if int(hours) > 24:
        return f"{number(hours)} {number(minutes)}{half}"
    words = cardinal(hours)
    if minutes == "00" and not seconds:
        if half:
            return words + half
        if int(hours) in (0, 24):
            return "midnight"
        return f"{words} o'clock" if int(hours) <= 12 else f"{words} hundred"
    words += f" {'oh ' if minutes[0] == '0' else ''}{cardinal(minutes)}" if minutes != "00" else ""
    if seconds:
        words += f" and {cardinal(seconds)} second{'' if seconds == '01' else 's'}"
    return words + half


def _money(found: Match, sign: str, amount: str, scale: str | None) -> str:
    one, many, cent, cents = CURRENCIES[sign]
    if scale:
        return f" {number(amount)} {SCALES[scale]} {many}"
    whole, _, part = amount.partition(".")
    if len(part) != 2 or not cent:
        return f" {number(amount)} {one if amount == '1' else many}"
    units = f"{number(whole)} {one if whole == '1' else many}"
    if part == "00":
        return f" {units}"
    small = f"{cardinal(part)} {cent if part == '01' else cents}"
    return f" {small}" if whole.strip("0,") == "" else f" {units} and {small}"


def _phone(found: Match) -> str:
    groups = re.findall(r"\d+", found[0])
    plus = "plus " if found[0].lstrip().startswith("+") else ""
    return f" {plus}{', '.join(spelled(group) for group in groups)}"


# ---------------------------------------------------------------------------------------------------- numbers, measures


def _measure(found: Match) -> str:
    amount, joint, unit, power = found[1], found[2], found[3], found[4]
    one, many = UNITS[unit]
    name = one if amount == "1" or joint == "-" else many
    if power:
        name = f"{'square' if power[-1] == '2' else 'cubic'} {name}"
    return f"{number(amount)} {name}"


def _part_measure(found: Match) -> str:
    """1/2 tsp, 3/4 km, 2 1/2 cups of units."""
    one, many = UNITS[found[4]]
    part = fraction(found[2], found[3])
    if found[1]:
        return f"{number(found[1])} and {'a' + part[3:] if part.startswith('one ') else part} {many}"
    article = "an" if one[0] in "aeiou" or one == "hour" else "a"
    return f"half {article} {one}" if part == "one half" else f"{part} of {article} {one}"


def _feet_inches(found: Match) -> str:
    inches = f" {number(found[2])}" if found[2] else ""
    return f"{number(found[1])} foot{inches} "


def _mixed_fraction(found: Match) -> str:
    part = fraction(found[2], found[3])
    return f"{number(found[1])} and {'a' + part[3:] if part.startswith('one ') and 'over' not in part else part}"


def _fraction(found: Match) -> str:
    known = {"24/7": "twenty four seven", "9/11": "nine eleven", "50/50": "fifty fifty"}.get(found[0])
    return known or fraction(found[1], found[2])


def _year_or_count(found: Match) -> str:
    digits = found[1]
    value = int(digits)
    text = found.string
    following = re.match(r"\s+([a-z]+)", text[found.end() : found.end() + 24])
    if following and following[1] in COUNTED:
        return cardinal(digits)
    before = text[max(0, found.start() - 12) : found.start()].lower().split()
    dated = before[-1:] and before[-1] in {
        "in",
        "since",
        "by",
        "from",
        "until",
        "before",
        "after",
        "year",
        "circa",
        "of",
    }
    return year(digits) if 1500 <= value <= 2099 or (dated and 1000 <= value <= 2099) else cardinal(digits)


def _decade(found: Match) -> str:
    digits = found[1]
    return plural(year(digits) if len(digits) == 4 else cardinal(digits))


def _counted_part(found: Match) -> str:
    value = roman(found[2])
    return found[0] if value is None else f"{found[1]} {cardinal(str(value))}"


def _regnal(found: Match) -> str:
    name, numeral = found[1], found[2]
    value = roman(numeral)
    royal = name.lower() in ROYAL
    if value is None or (len(numeral) == 1 and not royal):
        return found[0]
    return f"{name} the {ordinal(str(value))}" if royal else f"{name} {cardinal(str(value))}"


# -------------------------------------------------------------------------------------------------------------- words


def _abbreviation(found: Match) -> str:
    written = found[1]
    key = written.lower()
    text, start, end = found.string, found.start(), found.end()
    before = text[max(0, start - 40) : start]
    after = text[end : end + 3]
    if key in ("st", "dr"):
        # Behind a name it is part of an address, before one a title.
        if _TITLED.search(before) and not (key == "dr" and re.match(r"\s[A-Z]", after)):
            return "street" if key == "st" else "drive"
        return BEFORE_SOMETHING[key]
    if key in ONLY_CAPITALISED and not (written[0].isupper() and re.match(r"\s*\S", after)):
        return found[0]
    spoken = BEFORE_SOMETHING.get(key) or MAY_END.get(key)
    if spoken is None:
        return found[0]
    ends = key == "etc" and re.match(r"\s[A-Z]", after)
    return f"{spoken}." if ends or (key in MAY_END and key not in ("a.m", "p.m") and _ends(found)) else spoken


def _initials(found: Match) -> str:
    letters = " ".join(re.findall("[A-Za-z]", found[0])).lower()
    return f"{letters}." if _ends(found) else letters


def _ends(found: Match) -> bool:
    """Whether what is written with a dot ends its sentence as well: before a word that begins many of them."""
    following = found.string[found.end() : found.end() + 12].split()
    return bool(following) and following[0][0].isupper() and following[0].lower() in STARTERS


def _say_mixed(found: Match) -> str:
    """A code of letters and digits: MP3, B2B, covid19, 4K."""
    words: list[str] = []
    for part in re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", found[0]):
        if part.isdigit():
            pairs = len(part) == 4 and part[0] != "0"
            words.append(year(part) if pairs else spelled(part) if len(part) > 4 else number(part))
        elif part.isupper() and (len(part) < 3 or part not in SAID_AS_WORDS):
            words.append(" ".join(part.lower()))
        else:
            words.append(part.lower())
    return " ".join(words)


def _is_shouted(text: str) -> bool:
    words = re.findall(r"[A-Za-z]{2,}+", text)
    num_capital = sum(word.isupper() for word in words)
    return num_capital > 0.6 * len(words) and (num_capital > 1 or len(words) == 1)


def _say_word(found: Match, shouted: bool) -> str:
    word = found[0]
    stem, apostrophe, tail = word.partition("'")
    low = stem.lower()
    if stem.isupper() and len(stem) > 1:
        as_word = stem in SAID_AS_WORDS or len(stem) > 5 or (shouted and len(stem) > 2 and low not in SAID_AS_LETTERS)
        if not (as_word and re.search("[aeiouy]", low)) or (low in SAID_AS_LETTERS and not shouted):
            low = " ".join(low)
    elif plural_of := re.fullmatch(r"([A-Z]{2,5})s", stem):
        low = " ".join(plural_of[1].lower()) + " s"
        if plural_of[1] in SAID_AS_WORDS:
            low = stem.lower()
    elif stem.islower():
        letters = low in SAID_AS_LETTERS and low not in ONLY_IN_CAPITALS
        if letters or (2 <= len(low) <= 5 and low not in HUMS and not apostrophe and not re.search("[aeiouy]", low)):
            low = " ".join(low)
    else:
        # Words grown together: JavaScript, OpenAI. Names like McDonald stay whole.
        parts = re.findall(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|[A-Z]", stem)
        if len(parts) > 1 and all(len(part) > 2 or part.isupper() and len(part) > 1 for part in parts):
            low = " ".join(" ".join(part) if part.isupper() else part for part in parts).lower()
    return f"{low}{apostrophe}{tail.lower()}"


_WORD = re.compile(r"(?<![A-Za-z'])[A-Za-z]++(?:'[A-Za-z]++)*+")
_MIXED = re.compile(r"(?<![A-Za-z0-9])(?:[A-Za-z]++\d|\d++[A-Za-z])[A-Za-z0-9]*+")
_DIGITS = re.compile(r"\d++")
_SIGNS = re.escape("".join(CURRENCIES))
_SCALE = "|".join(sorted(SCALES, key=len, reverse=True))
_UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
_DAY = "Mon|Tue|Tues|Wed|Thu|Thur|Thurs|Fri|Sat|Sun"
_SHORT = "|".join(re.escape(short) for short in sorted({*BEFORE_SOMETHING, *MAY_END}, key=len, reverse=True))


def _p(pattern: str, replace: Callable[[Match], str] | str, flags: int = 0) -> Pass:
    if isinstance(replace, str):
        template = replace
        return re.compile(pattern, flags), lambda found: found.expand(template)
    return re.compile(pattern, flags), replace


_PASSES: list[Pass] = [
    # Dates and times first: their marks mean other things elsewhere.
    _p(r"(?<![\w/-])(\d{4})[-/](\d\d)[-/](\d\d)(?:[T ](\d\d:\d\d)(?::\d\d)?Z?)?(?![\w-])", _iso_date),
    _p(r"(?<![\w/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\w/])", _slash_date),
    _p(r"(?<![\w.])(\d{1,2})\.(\d{1,2})\.(\d{4})(?![\w])", _dotted_date),
    _p(r"(?<![\w.])v?(\d++(?:\.\d++){2,}+)(?!\w)", lambda found: number(found[1])),
    _p(rf"\b{_MONTH}\s(\d{{1,2}})(?:st|nd|rd|th)?\b(?![:\-/\d]|[.,]\d)(?:(,?\s)(\d{{4}})\b)?", _month_day),
    _p(rf"(\bthe\s)?\b(\d{{1,2}})(?:st|nd|rd|th)?\s(?:of\s)?{_MONTH}(?!\w)(?:,?\s(\d{{4}})\b)?", _day_month),
    _p(rf"\b{_MONTH}(?:,|\sof)?\s(\d{{4}})\b(?![.,]\d)", lambda found: f"{_month(found[1])} {year(found[2])}"),
    _p(r"(?<![\w:.-])(\d{1,2}(?::[0-5]\d)?)\s?-\s?(?=\d{1,2}(?::[0-5]\d|(?::[0-5]\d)?\s?[AaPp]\.?[Mm]\b))", r"\1 to "),
    _p(r"(?<![\w:.])(\d{1,2}):([0-5]\d)(?::([0-5]\d))?(?![:\d])(?:\s?" + _HALF_DAY + ")?", _clock),
    _p(r"(?<![\w:.])(\d{1,2})\s?" + _HALF_DAY, lambda found: cardinal(found[1]) + _half_day(found, 2)),
    _p(
        _HALF_DAY.replace("([AaPp])", r"(?<![\w.])([AaPp])").replace(r"|[Mm]\b", ""),
        lambda found: _half_day(found, 1)[1:],
    ),
    _p(r"(?<![\w:])(\d{1,3}):(\d{1,3})(?![:\w])", lambda found: f"{number(found[1])} to {number(found[2])}"),
    # Telephones.
    _p(r"(?<![\w.,/-])(?:\+?\d{1,3}[\s.-])?(?:\(\d{3}\)\s?|\d{3}[\s.-])\d{3}[\s.-]\d{4}(?![\w-]|\.\d)", _phone),
    _p(r"(?<![\w.,/-])\d{3}-\d{4}(?![\w-]|\.\d)", _phone),
    _p(r"(?<!\w)\+\d{1,3}(?:[\s().-]{1,2}\d{2,4}){2,6}+(?!\w)", _phone),
    # Money.
    _p(rf"([{_SIGNS}])({_N})\s?-\s?[{_SIGNS}]?(?=\d)", r"\1\2 to \1"),
    _p(
        rf"(?:\b(?:US|A|C|AU|CA|HK|NZ))?([{_SIGNS}])\s?({_N})(?:\s?-?({_SCALE})\b)?",
        lambda found: _money(found, found[1], found[2], found[3]),
    ),
    _p(rf"({_N})\s?([{_SIGNS}])", lambda found: _money(found, found[2], found[1], None)),
    # Ranges, signs, measures.
    _p(r"(?<=\d)\s?-\s?(?=\d)", " to "),
    _p(r"(?<=\d)\s?[x×]\s?(?=\d)", " by "),
    _p(r"(?<![\w.)\]])-(?=[.\d])", " minus "),
    _p(r"(?<![\w.])\.(?=\d)", "0."),
    _p(r"(?<!\w)(\d{1,2})' ?(\d{1,2})(?:\"|'')", _feet_inches),
    _p(rf"(?<![\w/.,])(?:(\d{{1,3}})\s)?(\d{{1,2}})/(\d{{1,2}})\s?({_UNIT})(?!\w)(?:\.(?=\s[a-z\d]))?", _part_measure),
    _p(rf"({_N})(\s?|-)({_UNIT})((?:\^|\b)[23])?(?![\w^])(?:\.(?=\s[a-z\d]))?", _measure),
    _p(rf"({_N})\ss(?!\w)", lambda found: f"{number(found[1])} second{'' if found[1] == '1' else 's'}"),
    _p(r"(?<=\w)\^2\b", " squared"),
    _p(r"(?<=\w)\^3\b", " cubed"),
    _p(r"(?<![\w/.,])(\d{1,3})\s(\d{1,2})/(\d{1,2})(?![\w/])", _mixed_fraction),
    _p(r"(?<![\w/.,])(\d{1,3})/(\d{1,3})(?![\w/])", _fraction),
    _p(
        r"(?<![\w,.])(\d{1,3}(?:,\d{3})++|\d{1,20})(?:st|nd|rd|th|ST|ND|RD|TH)\b",
        lambda found: ordinal(found[1].replace(",", "")),
    ),
    _p(rf"({_N})\s?[xX](?!\w)", lambda found: f"{number(found[1])} times"),
    _p(rf"({_N})([kM])(?!\w)", lambda found: f"{number(found[1])} {SCALES[found[2]]}"),
    _p(r"(?<!\w)'?(\d{3}0|\d0)'?s\b", _decade),
    _p(r"#\s?(?=\d)", " number "),
    _p(r"(?i:\b(call|dial|phone))\s911\b", r"\1 nine one one"),
    # Words that are written short.
    _p(rf"\b({_DAY})-({_DAY})\b", lambda found: f"{MAY_END[found[1].lower()]} to {MAY_END[found[2].lower()]}"),
    _p(r"\b([A-Z]{1,3})&([A-Z]{1,2})\b", lambda found: f"{' '.join(found[1])} and {' '.join(found[2])}".lower()),
    _p(r"\b(?:No|Nos|no)\.\s?(?=\d)", "number "),
    _p(r"\bpp\.\s?(?=\d)", "pages "),
    _p(r"\bp\.\s?(?=\d)", "page "),
    _p(rf"(?<![\w.])({_SHORT})\.(?!\w)", _abbreviation, re.I),
    _p(r"\b(Mr|Mrs|Ms|Dr|Prof|St)\s(?=[A-Z][a-z])", _abbreviation),
    _p(rf"\b({COUNTED_PARTS})\s([IVXLC]+)\b", _counted_part),
    _p(r"\b([A-Z][a-z]+)\s([IVX]+)\b(?!')", _regnal),
    _p(r"\bPh\.?D\b\.?", "p h d"),
    _p(r"(?<![\w.])(?:[A-Za-z]\.){2,}+[A-Za-z]?(?!\w)", _initials),
    _p(r"(?<![\w.])([A-Z])\.(?=\s[A-Z])", lambda found: found[1].lower()),
    _p(r"\bkm/h\b", "kilometers per hour"),
    _p(r"\bw/o\b", "without"),
    _p(r"\bw/(?=\s)", "with"),
    _p(
        r"\b(and/or|he/she|she/he|his/her|him/her)\b",
        lambda found: found[0].replace("and/or", "and or").replace("/", " or "),
    ),
    _p(r"(?<=[a-z])\.(?=[a-z])", " dot "),
    _p(r"(?<=[a-z])\.(?=[A-Z])", ". "),
    # What is left of the digits.
    _p(r"(?<![\w.,])(\d{4})(?![\w]|[.,]\d)", _year_or_count),
    _p(_N, lambda found: f" {number(found[0])} "),
]

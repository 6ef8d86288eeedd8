"""Numbers as English words, in lower case, without hyphens and commas: 1250000 -> "one million two hundred and fifty thousand".

Our own rather than the package `inflect` (which the tests compare with): importing that takes a second, which would be the
first listener's. Takes strings of ASCII digits of any length and never raises for them; knows no context.
"""

from __future__ import annotations

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ["", "thousand", "million", "billion", "trillion", "quadrillion", "quintillion"]
_ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    **{"twelve": "twelfth"},
}
MOST_DIGITS = 3 * len(_SCALES)  # of a cardinal; what is longer is read digit by digit
_PLAIN_DIGITS = 9  # of a number without separators: a longer one is a code, not a quantity
_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def cardinal(digits: str) -> str:
    """ "1001" -> "one thousand and one"; more than 21 digits are read one by one."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > MOST_DIGITS:
        return spelled(digits)
    padded = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [int(padded[at : at + 3]) for at in range(0, len(padded), 3)]
    parts: list[str] = []
    for at, group in enumerate(groups):
        scale = _SCALES[len(groups) - 1 - at]
        if group:
            last = not scale and bool(parts) and group < 100
            parts.append(f"{'and ' if last else ''}{_below_thousand(group)} {scale}".rstrip())
    return " ".join(parts) or "zero"


def ordinal(digits: str) -> str:
    """ "21" -> "twenty first"."""
    before, _, last = cardinal(digits).rpartition(" ")
    if last in _ORDINALS:
        last = _ORDINALS[last]
    else:
        last = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return f"{before} {last}".strip()


def spelled(digits: str) -> str:
    """Digit by digit, with a comma after every four of a long row, where a breath is taken."""
    words = [_UNITS[int(digit)] for digit in digits]
    if len(words) <= 6:
        return " ".join(words)
    return ", ".join(" ".join(words[at : at + 4]) for at in range(0, len(words), 4))


def number(text: str) -> str:
    """A number as written: "1,250", "007", "3.14", ".5", "1.2.3". Codes (leading zeros, long rows) are read by digits."""
    if text.count(".") > 1:
        word = " dot " if text.count(".") == 3 else " point "  # an address has four numbers, a version mostly three
        return word.join(number(part) for part in text.split(".") if part)
    whole, point, fraction = text.partition(".")
    bare = whole.replace(",", "")
    if not bare:
        words = ""
    elif (len(bare) > 1 and bare[0] == "0" and not fraction) or ("," not in whole and len(bare) > _PLAIN_DIGITS):
        words = spelled(bare)
    else:
        words = cardinal(bare)
    if point and fraction:
        words = f"{words} point {spelled(fraction).replace(',', '')}".strip()
    return words


def year(digits: str) -> str:
    """Four digits as a year: "1998" -> "nineteen ninety eight", "2005" -> "two thousand and five"."""
    century, rest = digits[:2], digits[2:]
    if digits[0] == "0" or digits[1:3] == "00":
        return cardinal(digits)
    if rest == "00":
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest[0] == '0' else ''}{cardinal(rest)}"


def plural(words: str) -> str:
    """The plural of a number's last word: "nineteen ninety" -> "nineteen nineties"."""
    if words.endswith("y"):
        return words[:-1] + "ies"
    return words + ("es" if words.endswith("x") else "s")


def fraction(top: str, bottom: str) -> str:
    """ "3", "4" -> "three quarters"; large denominators are read as "over"."""
    above, below = int(top), int(bottom)
    if below == 0 or below > 20 and below not in (100, 1000) or above > 999:
        return f"{number(top)} over {number(bottom)}"
    name = {1: "over one", 2: "half", 4: "quarter"}.get(below) or ordinal(bottom)
    if below == 1:
        return f"{number(top)} {name}"
    if above != 1:
        name = "halves" if below == 2 else name + "s"
    return f"{number(top)} {name}"


def roman(letters: str) -> int | None:
    """The value of a Roman numeral below 4000 in its usual form, else None."""
    total = 0
    for at, letter in enumerate(letters):
        value = _ROMAN.get(letter, 0)
        following = _ROMAN.get(letters[at + 1], 0) if at + 1 < len(letters) else 0
        total += -value if value < following else value
    return total if 0 < total < 4000 and _as_roman(total) == letters else None


def _as_roman(value: int) -> str:
    out = ""
    for step, letters in (
        *((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")),
        *((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")),
    ):
        out += letters * (value // step)
        value %= step
    return out


def _below_thousand(value: int) -> str:
    hundreds, rest = divmod(value, 100)
    words = f"{_UNITS[hundreds]} hundred" if hundreds else ""
    if rest:
        tens, units = divmod(rest, 10)
        small = _UNITS[rest] if rest < 20 else f"{_TENS[tens]} {_UNITS[units] if units else ''}".strip()
        words = f"{words} and {small}" if words else small
    return words

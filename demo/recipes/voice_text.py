"""Sentences for the demo voice to learn from: written text as people type it beside the words that are spoken.

    python demo/recipes/voice_text.py --count 20 [--seed 7]

Sources, all free to use: example sentences and glosses of WordNet 3.0 (Debian's wordnet-base), verses of the King James
Bible (bible-kjv, read through its `bible` command), templates of our own (numbers, dates, names, addresses) and words in
random order from /usr/share/dict/words (wamerican), which teach spelling rules that no phrase gives away. The same seed
gives the same sentences on every machine that has the same packages.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import inflect

WORDNET = Path("/usr/share/wordnet")
WORDS = Path("/usr/share/dict/words")
LETTERS = "abcdefghijklmnopqrstuvwxyz ',.?"
MIN_WORDS, MAX_WORDS, MAX_CHARS, LONGEST_WORD = 2, 14, 90, 16

# Shares of the corpus. WordNet's examples are its best part: short, natural, of an open vocabulary.
SHARES = {"example": 0.52, "gloss": 0.10, "verse": 0.06, "template": 0.20, "random": 0.12}

_speller = inflect.engine()
_SPOKEN = re.compile(rf"[{LETTERS}]+")
_VOWEL = re.compile("[aeiouy]")

PEOPLE = (
    "john mary david sarah michael emma james anna robert linda william susan peter julia thomas alice george helen "
    "charles laura daniel karen henry nancy jack lucy sam kate tom jane richard olivia martin sophie"
).split()
CITIES = (
    "london paris berlin boston chicago rome madrid dublin denver seattle austin tokyo sydney vienna oslo lisbon"
).split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
MONTHS = "january february march april may june july august september october november december".split()
THINGS = (
    "book car phone letter table chair house garden window door bag shirt coat dog cat bottle picture computer "
    "bicycle cake sandwich ticket key map lamp bed boat train guitar piano umbrella camera blanket"
).split()
LOOKS = (
    "old new red blue green small big heavy cheap beautiful broken clean dark bright wooden empty quiet strange favorite "
    "warm cold yellow expensive round soft"
).split()
PLACES = (
    "park office kitchen market school library station hospital airport museum hotel restaurant beach church bank shop "
    "street garden village city theater harbor"
).split()
DEEDS = "bought sold found lost saw painted opened closed moved carried cleaned forgot broke fixed hid borrowed".split()
WEATHER = "rainy sunny cloudy windy stormy foggy cold warm snowy mild".split()


def spell(number: int) -> str:
    """The number in words, without hyphens and commas: 1234 -> one thousand two hundred and thirty four."""
    return re.sub(r"[-,]", " ", _speller.number_to_words(number)).replace("  ", " ")  # type: ignore[arg-type]


def spell_ordinal(number: int) -> str:
    """21 -> twenty first."""
    return str(_speller.number_to_words(_speller.ordinal(number))).replace("-", " ")  # type: ignore[arg-type]


def spoken(text: str) -> str | None:
    """Lower case, digits spelled, only `LETTERS`; None for what is no plain sentence of the length wanted."""
    text = text.replace("`", "'").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").replace('"', "")
    text = re.sub(r"\d{1,6}", lambda found: f" {spell(int(found[0]))} ", text.lower().replace("-", " "))
    text = re.sub(r"[;:]", ",", text).replace("!", ".")
    text = re.sub(r"\s+", " ", text).strip(" ,'")
    text = re.sub(r" ([,.?])", r"\1", text)
    text = re.sub(r"([,.?])[,.?]+", r"\1", text)
    if not text:
        return None
    if text[-1] not in ".?":
        text += "."
    words = text.split()
    if (
        not _SPOKEN.fullmatch(text)
        or "." in text[:-1]
        or "?" in text[:-1]
        or not MIN_WORDS <= len(words) <= MAX_WORDS
        or len(text) > MAX_CHARS
        or max(map(len, words)) > LONGEST_WORD
    ):
        return None
    bare = [word.strip(",.?'") for word in words]
    if any(len(word) == 1 and word not in "aio" for word in bare):
        return None
    if any(word and not _VOWEL.search(word) for word in bare):
        return None
    return text


def _wordnet(rng: random.Random, kind: str) -> Iterator[str]:
    for path in sorted(WORDNET.glob("data.*")):
        for line in path.read_text(encoding="latin-1").splitlines():
            _, bar, about = line.partition("|")
            if not bar:
                continue
            if kind == "example":
                for quoted in re.findall(r'"([^"]+)"', about):
                    yield re.sub(r"\([^)]*\)", "", quoted)
            elif rng.random() < 0.3 and "(" not in (gloss := about.partition('"')[0].partition(";")[0]):
                yield gloss


def _verses(rng: random.Random) -> Iterator[str]:
    told = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    for line in told.splitlines():
        for part in re.split(r"[.;:?!]\s*", line.partition(" ")[2]):
            if rng.random() < 0.5:
                yield part


def _random_words(rng: random.Random) -> Iterator[str]:
    words = [word for word in WORDS.read_text().split() if re.fullmatch("[a-z]{3,12}", word) and word[-1] != "s"]
    while True:
        yield " ".join(rng.sample(words, rng.randint(2, 6)))


def _templates(rng: random.Random) -> Iterator[str]:
    def any_of(words: list[str]) -> str:
        return rng.choice(words)

    def number(low: int, high: int) -> str:
        return spell(rng.randint(low, high))

    def clock() -> str:
        past = rng.choice(["", " fifteen", " thirty", " forty five", " twenty", " ten", " o'clock", " oh five"])
        return f"{number(1, 12)}{past} {rng.choice(['', 'a m', 'p m', 'in the morning', 'in the evening'])}".strip()

    def year() -> str:
        century, rest = rng.choice(["eighteen", "nineteen", "twenty"]), rng.randint(1, 99)
        return f"{century} {'oh ' if rest < 10 else ''}{spell(rest)}"

    def money() -> str:
        cents = f" and {number(2, 99)} cents" if rng.random() < 0.3 else ""
        return f"{number(2, 2000)} dollars{cents}"

    made: list[Callable[[], str]] = [
        lambda: f"{any_of(PEOPLE)} was born on {any_of(MONTHS)} {spell_ordinal(rng.randint(1, 31))} {year()}",
        lambda: f"the {any_of(THINGS)} costs {money()}",
        lambda: f"it is {clock()} on {any_of(DAYS)}",
        lambda: f"{any_of(PEOPLE)} {any_of(DEEDS)} the {any_of(LOOKS)} {any_of(THINGS)} near the {any_of(PLACES)}",
        lambda: f"my {any_of(THINGS)} is in the {any_of(PLACES)}",
        lambda: (
            f"{rng.choice(['she', 'he', 'they', 'we', 'i'])} {any_of(DEEDS)} {rng.choice(['a', 'the', 'my', 'her', 'our'])} "
            f"{any_of(LOOKS)} {any_of(THINGS)} {rng.choice(['yesterday', 'last week', 'this morning', 'on ' + any_of(DAYS)])}"
        ),
        lambda: f"did {any_of(PEOPLE)} go to the {any_of(PLACES)} with {any_of(PEOPLE)}?",
        lambda: f"there are {number(2, 999)} {any_of(THINGS)}s in the {any_of(PLACES)}",
        lambda: f"{any_of(PEOPLE)} and {any_of(PEOPLE)} will meet in {any_of(CITIES)} at {clock()}",
        lambda: f"please put the {any_of(LOOKS)} {any_of(THINGS)} on the {any_of(LOOKS)} {any_of(THINGS)}",
        lambda: f"where is the {any_of(LOOKS)} {any_of(THINGS)} that {any_of(PEOPLE)} {any_of(DEEDS)}?",
        lambda: f"in {year()} she moved to {any_of(CITIES)}",
        lambda: f"call {' '.join(number(0, 9) for _ in range(rng.randint(4, 8)))} now",
        lambda: f"about {number(1, 99)} point {number(0, 9)} percent of the {any_of(THINGS)}s were {any_of(LOOKS)}",
        lambda: f"the answer is {number(0, 10000)}",
        lambda: f"tomorrow will be {any_of(WEATHER)} and {any_of(WEATHER)} in {any_of(CITIES)}",
        lambda: f"doctor {any_of(PEOPLE)} lives at {number(1, 300)} {any_of(PLACES)} street",
        lambda: f"{rng.choice(['yes', 'no', 'okay', 'well', 'sorry', 'thank you', 'hello'])}, {any_of(PEOPLE)}",
    ]
    while True:
        yield rng.choice(made)()


def sentences(count: int, seed: int, *, without: frozenset[str] = frozenset()) -> list[str]:
    """`count` different sentences in random order, none of `without` (the sentences of a test)."""
    rng = random.Random(seed)
    sources: dict[str, Iterator[str]] = {
        "example": _wordnet(rng, "example"),
        "gloss": _wordnet(rng, "gloss"),
        "verse": _verses(rng),
        "random": _random_words(rng),
        "template": _templates(rng),
    }
    found: list[str] = []
    seen = set(without)
    for kind, source in sources.items():
        mine: list[str] = []
        endless = kind in ("random", "template")
        wanted = round(SHARES[kind] * count)
        for text in source:
            if endless and len(mine) >= wanted:
                break
            sentence = spoken(text)
            if sentence is not None and sentence not in seen:
                seen.add(sentence)
                mine.append(sentence)
        rng.shuffle(mine)
        found += mine[:wanted]
    rng.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Print sentences for the demo voice.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    for sentence in sentences(options.count, options.seed):
        print(sentence)


if __name__ == "__main__":
    main()

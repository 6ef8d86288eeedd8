"""Typed text to spoken words: the held-out sentences of the demo voice, a table of writing, and any string at all."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.models.speech_text import LETTERS, normalize, spell_letters

HELD_OUT = Path(__file__).resolve().parents[2] / "demo" / "recipes" / "voice_heldout.tsv"


def test_the_held_out_sentences_of_the_demo_voice() -> None:
    with HELD_OUT.open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) == 50
    assert [(typed, normalize(typed)) for typed, _ in rows] == [(typed, spoken) for typed, spoken in rows]


@pytest.mark.parametrize(
    ("typed", "spoken"),
    [
        # dates
        ("On 2026-12-01 we met", "on december first twenty twenty six we met."),
        ("Dec. 1", "december first."),
        ("3/4/2025", "march fourth twenty twenty five."),
        ("25/12/24", "december twenty fifth twenty twenty four."),
        ("1 December 2026", "the first of december twenty twenty six."),
        ("the 1st of May", "the first of may."),
        ("01.12.2026", "december first twenty twenty six."),
        ("Sept. 3, 1999, was warm", "september third, nineteen ninety nine, was warm."),
        ("Mon., Jan. 5th", "monday, january fifth."),
        ("may 5 people come?", "may five people come?"),
        ("2026-13-41", "twenty twenty six to thirteen to forty one."),
        # times
        ("at 7:05", "at seven oh five."),
        ("10:45 p.m. on Friday", "ten forty five p m on friday."),
        ("at noon", "at noon."),
        ("7:00, 14:30, 00:00", "seven o'clock, fourteen thirty, midnight."),
        ("5pm or 5 AM", "five p m or five a m."),
        ("We left at 5 p.m. Then it rained.", "we left at five p m. then it rained."),
        ("1:02:03", "one oh two and three seconds."),
        ("I am 5", "i am five."),
        ("5:00-6:00 p.m., 7-9 pm", "five o'clock to six p m, seven to nine p m."),
        ("Mon-Fri 9-5", "monday to friday nine to five."),
        ("2024/05/01", "may first twenty twenty four."),
        # money
        ("$3, $1, $1.50", "three dollars, one dollar, one dollar and fifty cents."),
        ("€20 or 20€", "twenty euros or twenty euros."),
        ("£5.20", "five pounds and twenty pence."),
        ("$0.99 and $1.01", "ninety nine cents and one dollar and one cent."),
        ("$5 million, $1.2bn, $40k", "five million dollars, one point two billion dollars, forty thousand dollars."),
        ("¥1,000", "one thousand yen."),
        # telephones
        ("555-1234", "five five five, one two three four."),
        ("(555) 123-4567", "five five five, one two three, four five six seven."),
        ("+1 555 123 4567", "plus one, five five five, one two three, four five six seven."),
        # years
        ("in 1998, 2005, 1776, 1900, 1905", "in nineteen ninety eight, two thousand and five, seventeen seventy six, "
         "nineteen hundred, nineteen oh five."),
        ("the 90s, '80s, 1990s", "the nineties, eighties, nineteen nineties."),
        ("1914-1918", "nineteen fourteen to nineteen eighteen."),
        ("1600 people in 1066", "one thousand six hundred people in ten sixty six."),
        # numbers
        ("1.5 .5 3.14", "one point five zero point five three point one four."),
        ("1,250,000", "one million two hundred and fifty thousand."),
        ("2nd 3rd 21st 1,000th", "second third twenty first one thousandth."),
        ("1/2, 3/4, 2 1/2, 1½", "one half, three quarters, two and a half, one and a half."),
        ("24/7", "twenty four seven."),
        ("10-20, pp. 5–7", "ten to twenty, pages five to seven."),
        ("-5 degrees, 007", "minus five degrees, zero zero seven."),
        ("v1.2.3 at 10.0.0.1", "one point two point three at ten dot zero dot zero dot one."),
        ("1234567890", "one two three four, five six seven eight, nine zero."),
        ("٣٤ ５６", "thirty four fifty six."),
        ("3 x 4 is 2x more", "three by four is two times more."),
        # units
        ("5 km, 1 km, 3kg", "five kilometers, one kilometer, three kilograms."),
        ("20°C, 60 mph", "twenty degrees celsius, sixty miles per hour."),
        ("75%, 5-10%", "seventy five percent, five to ten percent."),
        ("a 5-km run", "a five kilometer run."),
        ("10 m², 8GB", "ten square meters, eight gigabytes."),
        ("5'10\" tall", "five foot ten tall."),
        ("1/2 tsp. of salt, 3/4 h, 2 1/2 km", "half a teaspoon of salt, three quarters of an hour, two and a half kilometers."),
        ("6 ft. 2 in. tall", "six feet two inches tall."),
        ("9.58 s, 5 s", "nine point five eight seconds, five seconds."),
        # abbreviations, initials
        ("Dr. Who of Elm Dr. is here", "doctor who of elm drive is here."),
        ("St. Peter, 24 Baker St. in town", "saint peter, twenty four baker street in town."),
        ("Mrs. Lee vs. Mr Ray, Jr.", "missis lee versus mister ray, junior."),
        ("e.g. this, i.e. that, etc.", "for example this, that is that, et cetera."),
        ("J. K. Rowling", "j k rowling."),
        ("Martin Luther King Jr. Day", "martin luther king junior day."),
        ("It is by Acme Inc. The end", "it is by acme incorporated. the end."),
        ("the U.S. Army", "the u s army."),
        ("AT&T, R&D", "a t and t, r and d."),
        ("x <= 10", "x at most ten."),
        ("Flight BA2490, exit 14B, call 911", "flight b a twenty four ninety, exit fourteen b, call nine one one."),
        ("J.R.R. Tolkien of the U.K.", "j r r tolkien of the u k."),
        ("No. 5 in the sun. No.", "number five in the sun. no."),
        # acronyms and capitals
        ("NASA and the FBI", "nasa and the f b i."),
        ("the CEO's CDs", "the c e o's c d s."),
        ("MP3, B2B, H2O, 4K", "m p three, b two b, h two o, four k."),
        ("an iPhone with JavaScript by OpenAI", "an iphone with java script by open a i."),
        ("WATCH OUT NOW!", "watch out now."),
        ("This is VERY important. STOP!", "this is very important. stop."),
        ("html, css, tv", "h t m l, c s s, t v."),
        ("hmm, tell us", "hmm, tell us."),
        # Roman numerals
        ("Chapter IV", "chapter four."),
        ("Louis XIV and Henry V", "louis the fourteenth and henry the fifth."),
        ("World War II, Part I", "world war two, part one."),
        ("I saw Pope John Paul II", "i saw pope john paul the second."),
        # addresses
        ("https://www.example.com/a-b?q=1", "example dot com slash a dash b."),
        ("See example.org. Or not.", "see example dot org. or not."),
        ("bob.smith@example.com", "bob dot smith at example dot com."),
        ("#MeToo, #5, @bob", "hashtag me too, number five, at bob."),
        # signs, marks, layout
        ("salt & pepper", "salt and pepper."),
        ("1 + 1 = 2", "one plus one equals two."),
        ("a < b", "a less than b."),
        ("and/or, he/she, w/o", "and or, he or she, without."),
        ("**bold** and `code`", "bold and code."),
        ("[a link](https://x.com/y) and <b>tags</b>", "a link and tags."),
        ("- one\n- two", "one, two."),
        ("# Title", "title."),
        ("a line that\nis wrapped\n\na paragraph", "a line that is wrapped, a paragraph."),
        ("I 😀 it!!! 🎉👍🏽", "i it."),
        ("null\x00byte\x07", "null byte."),
        ("café naïve Zürich Øre Straße", "cafe naive zurich ore strasse."),
        ("“Hello,” she said (quietly)", "hello, she said, quietly."),
        ("well... yes — no: maybe; so", "well, yes, no, maybe, so."),
        ("it's the dogs' 'bone'", "it's the dogs bone."),
        ("sooooooo good", "sooo good."),
        ("", ""),
        ("?!", ""),
        ("日本語", ""),
    ],
)  # fmt: skip
def test_writing(typed: str, spoken: str) -> None:
    assert normalize(typed) == spoken


@given(st.text(max_size=400))
@settings(max_examples=120, deadline=None)
def test_any_string_becomes_letters(text: str) -> None:
    check(normalize(text))


@given(st.text(alphabet="0123456789.,:/-+$€£%'\"()#@ aApPmMtThsIVXxkKdD°\n", max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_numbers_become_letters(text: str) -> None:
    check(normalize(text))


def check(spoken: str) -> None:
    assert set(spoken) <= set(LETTERS)
    assert spoken == "" or (spoken[-1] in ".?" and spoken[0] not in " ,.?'")
    assert "  " not in spoken and max(map(len, spoken.split()), default=0) < 45


@given(st.integers(0, 10**30))
@settings(max_examples=60, deadline=None)
def test_no_digit_is_lost(value: int) -> None:
    """A number never disappears: it has a word at least for every three digits that are not zeros."""
    spoken = normalize(f"x {value} y")
    assert len(spoken.split()) >= 2 + len(str(value).rstrip("0")) // 3


@pytest.mark.parametrize(
    "unit",
    ["a", "1", "A", "1,", "1.", "a.", " ", "\n", "(", "[", "<a ", "$1", "-", "a@", "a-", "http://", "1:1:", "1/2 ", "a1B", ". "]
    + ["*", "'", "a'", "U.", "\ufdfa", "Xy VI ", "+1 ", "5' ", "Dr. ", "p.m.", "Dec. 1 ", "_", "|", "#a", "1-", "0" * 5000 + " "],
)  # fmt: skip
def test_hostile_text_takes_no_longer(unit: str) -> None:
    """One pattern that goes back over what it has read would take minutes here."""
    text = unit * (50_000 // len(unit))
    check_letters = set(normalize(text))
    assert check_letters <= set(LETTERS)


def test_letters_by_their_names() -> None:
    assert spell_letters("ten forty five p m on a day.") == "ten forty five pee em on a day."
    assert spell_letters("the f b i, a t m, i see a.") == "the eff bee eye, ay tee em, i see a."
    assert spell_letters("what am i a robot? open a i.") == "what am i a robot? open ay eye."
    assert spell_letters("i'd go, o'clock.") == "i'd go, o'clock."

"""Typed text to plain text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.models.plain_text import KEPT, plain, spell_address, tidy


@pytest.mark.parametrize(
    ("typed", "flat"),
    [
        ("naïve café", "naive cafe"),
        ("“quotes” ‘and’ it’s", "\"quotes\" 'and' it's"),
        ("10–20", "10 - 20"),
        ("½ m²", " 1/2 m^2"),
        ("# Title\n> quote\n* item\n2) second", "\nTitle\n\nquote\n\nitem\n\n2, second"),
        ("[text](http://a.com) ![alt](b.png)", "text alt"),
        ("a_b ~~c~~ __d__", "a b c d"),
        ("x\u200dy\u00adz", "xyz"),
        ("7 &amp; 8 &lt; 9", "7 & 8 < 9"),
    ],
)
def test_plain(typed: str, flat: str) -> None:
    assert plain(typed) == flat


def test_addresses() -> None:
    assert spell_address("my-site.co.uk/path_1") == "my dash site dot co dot u k slash path underscore one"
    assert plain("main.py is no address").startswith("main.py"), "an ending that is no domain"


@given(st.text(max_size=300))
@settings(max_examples=80, deadline=None)
def test_plain_is_ascii_and_a_few_signs(text: str) -> None:
    assert all(char in KEPT or char == "\n" or (char.isascii() and char.isprintable()) for char in plain(text))


def test_tidy_keeps_words_of_any_language() -> None:
    assert tidy("# Grüße,  **Welt** 🎉\x00\nsecond `line`") == "Grüße, Welt second line"
    assert tidy("日本語 text <laugh>") == "日本語 text <laugh>"

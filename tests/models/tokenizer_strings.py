"""500 strings that tokenizers disagree on, from a seed: digits, code, CJK, emoji, spaces, combining marks, odd ends."""

from __future__ import annotations

import random

WORDS = "the cat didn't see it's I'LL we'Ve naïve café Straße HTTPServer snake_case ﬁne ⅷ ½ Ⅳ don’t o'clock".split()
DIGITS = ["0", "7", "12", "2024", "3.14159", "1,000,000", "0x1F", "٣٤", "９９", "²³", "1e-9", "007 008", "12  34"]
CODE = [
    "def f(x):\n    return x**2\n",
    "for(int i=0;i<n;++i){\n\ta[i]=0;\n}",
    "<div class='a'>&nbsp;</div>",
    "SELECT * FROM t WHERE a>=1;",
    '#!/bin/sh\r\necho "$1"\r\n',
    "x = {'k': [1, 2, 3]}",
    "a->b::c",
    "!=\t===\n\n\n",
]
CJK = [
    "你好，世界",
    "東京都",
    "こんにちは",
    "안녕하세요",
    "中文English混排123",
    "「括弧」",
    "ｶﾀｶﾅ",
    "漢字かな交じり文。",
]
EMOJI = ["😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🧑🏿‍🚀", "☃", "🏴󠁧󠁢󠁳󠁣󠁴󠁿"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", " \n", "\r\n", "\u00a0", "\u3000", "\u2028", " \t ", "        "]
MARKS = [
    "e\u0301",
    "n\u0303o",
    "a\u0308\u0323",
    "\u0e01\u0e33",
    "क्षि",
    "\u200b",
    "\u200d",
    "\ufeff",
    "ﷺ",
    "\u0000",
    "\x07",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<|im_end", "|>", "<repo_name>", "Ġ", "▁"]
KINDS = (WORDS, DIGITS, CODE, CJK, EMOJI, SPACES, MARKS)


def strings(num: int = 500, seed: int = 2, *, special: bool = False) -> list[str]:
    """`special` mixes in spellings of special tokens."""
    rng = random.Random(seed)
    kinds = (*KINDS, SPECIAL) if special else KINDS
    fixed = [kind[0] for kind in kinds] + [item for kind in kinds for item in kind]
    out = []
    for index in range(num):
        if index < len(fixed):
            out.append(fixed[index])
            continue
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = kinds[int(rng.random() * len(kinds))]
            parts.append(kind[int(rng.random() * len(kind))])
            if rng.random() < 0.5:
                parts.append(" " * int(rng.random() * 4))
        if rng.random() < 0.1:  # any character at all
            parts.append(chr(int(rng.random() * 0xD7FF)))
        out.append("".join(parts))
    return out

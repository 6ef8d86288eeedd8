"""LocalAgreement-2 as a pure policy."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.agreement import LocalAgreement
from motet.engine.types import Word


def words(text: str, *, start: float = 0.0, each: float = 0.3) -> list[Word]:
    return [
        Word(word=f" {word}", start=start + i * each, end=start + (i + 1) * each, probability=1.0)
        for i, word in enumerate(text.split())
    ]


def text(parts: list[Word]) -> str:
    return "".join(part.word for part in parts).strip()


def test_two_hypotheses_in_a_row_commit() -> None:
    policy = LocalAgreement()
    assert policy.update(words("the cat")) == [] and text(policy.tentative) == "the cat"
    assert text(policy.update(words("the cat sad"))) == "the cat" and text(policy.tentative) == "sad"
    assert policy.update(words("the cat sat on")) == [] and text(policy.tentative) == "sat on"
    assert text(policy.update(words("the cat sat on the"))) == "sat on"
    assert text(policy.flush()) == "the" and policy.tentative == [] and policy.flush() == []


def test_punctuation_must_agree_before_it_is_committed() -> None:
    policy = LocalAgreement()
    policy.update(words("yes."))
    assert policy.update(words("yes, I")) == []
    assert text(policy.update(words("yes, I do"))) == "yes, I"


def test_overlap_with_the_committed_tail_is_dropped() -> None:
    policy = LocalAgreement()
    for _ in range(2):
        policy.update(words("one two three"))
    late = words("Two, three. four", start=0.85)  # times are off: the buffer was cut
    policy.update(late)
    assert text(policy.update(late)) == "four"


def test_a_word_said_twice_stays() -> None:
    policy = LocalAgreement()
    policy.update(words("very"))
    policy.update(words("very"))
    policy.update(words("very very good"))
    assert text(policy.update(words("very very good"))) == "very good"


def test_times_never_run_backwards() -> None:
    policy = LocalAgreement()
    policy.update(words("a b"))
    first = policy.update(words("a b"))
    again = [Word(word=" c", start=0.55, end=0.5, probability=1.0)]
    policy.update(again)
    third = policy.update(again)
    assert third[0].start >= first[-1].end and third[0].end >= third[0].start


def test_drop_forgets_what_was_tentative() -> None:
    policy = LocalAgreement()
    policy.update(words("a b c"))
    policy.drop(2.0)
    assert policy.tentative == [] and policy.update(words("a b c")) == []
    later = words("a b c", start=2.0)
    policy.update(later)
    assert text(policy.update(later)) == "a b c"


def test_trim_point() -> None:
    policy = LocalAgreement()
    for _ in range(2):
        policy.update(words(" ".join(map(str, range(40)))))  # 12 s committed
    assert policy.trim_point([5.0, 11.0], start=0, end=14) is None
    assert policy.trim_point([5.0, 11.0, 13.0], start=0, end=16) == 11.0
    assert policy.trim_point([13.0], start=0, end=16) is None
    assert policy.trim_point([], start=0, end=26) == policy.committed_end
    assert policy.trim_point([], start=12.5, end=40) is None


@settings(max_examples=60, deadline=None)
@given(
    spoken=st.lists(st.sampled_from(["a", "b", "c", "no", "yes"]), min_size=1, max_size=30),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=20),
)
def test_right_prefixes_with_any_noise_behind_give_the_spoken_words(
    spoken: list[str], steps: list[tuple[int, int]]
) -> None:
    """Whatever the unsure tail says (never the same twice), only what was said gets committed, once and in order."""
    policy = LocalAgreement()
    heard, committed = 0, []
    for number, (more, noise) in enumerate(steps):
        heard = min(heard + more, len(spoken))
        tail = [f"noise{number}.{i}" for i in range(noise)]
        committed += policy.update(words(" ".join([*spoken[:heard], *tail])))
        assert text(committed).split() == spoken[: len(committed)]
        shown = text(committed).split() + text(policy.tentative).split()
        assert shown == [*spoken[:heard], *tail]
    committed += policy.update(words(" ".join(spoken)))
    committed += policy.flush()
    assert text(committed).split() == spoken
    assert all(a.end <= b.start + 1e-9 for a, b in zip(committed, committed[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20), st.floats(0, 20)), max_size=8), max_size=8)
)
def test_any_hypotheses_are_survived(rounds: list[list[tuple[str, float, float]]]) -> None:
    """Times out of order, empty words' lengths, jumps: monotone times, nothing committed that was not offered."""
    policy = LocalAgreement()
    end, offered, committed = 0.0, 0, 0
    for hypothesis in rounds:
        given_words = [Word(word=f" {w}", start=a, end=b, probability=1.0) for w, a, b in hypothesis]
        offered += len(given_words)
        for word in policy.update(given_words):
            assert word.end >= word.start >= end
            end = word.end
            committed += 1
        assert end == policy.committed_end
    assert committed <= offered

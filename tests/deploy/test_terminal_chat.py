"""The terminal conversation: history, commands, and an interrupt in the middle of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.deploy.terminal_chat import TerminalChat
from motet.engine.errors import Overloaded


class Answer:
    """Pieces of text; None stands for Ctrl-C at that point."""

    def __init__(self, *pieces: str | None) -> None:
        self.pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            if piece is None:
                raise KeyboardInterrupt
            yield piece

    def close(self) -> None:
        self.closed = True


class Session:
    """One run of the loop over given lines; an exception class as a line is raised at the prompt."""

    def __init__(self, lines: list[Any], *answers: Answer, system: str | None = None) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.output = ""
        self.num_closed = 0
        queue = list(answers)

        def read(_: str) -> str:
            line = lines.pop(0) if lines else EOFError
            if isinstance(line, str):
                return line
            raise line

        def ask(messages: list[dict[str, Any]]) -> Answer:
            self.asked.append([dict(message) for message in messages])
            return queue.pop(0)

        self.chat = TerminalChat(ask, system=system, read=read, write=self._write, close=self._close)
        assert self.chat.run() == 0

    def _write(self, text: str) -> None:
        self.output += text

    def _close(self) -> None:
        self.num_closed += 1


def test_the_history_goes_with_every_question() -> None:
    session = Session(["hello", "again"], Answer("Hi", " you"), Answer("Yes"), system="Be brief.")
    assert [message["content"] for message in session.asked[1]] == ["Be brief.", "hello", "Hi you", "again"]
    assert "Hi you\n" in session.output
    assert session.num_closed == 1


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said() -> None:
    answer = Answer("One", None)
    session = Session(["count", "more"], answer, Answer("Two"))
    assert answer.closed
    assert "[stopped]" in session.output
    assert [message["content"] for message in session.asked[1]] == ["count", "One", "more"]


def test_an_interrupt_at_the_prompt_leaves() -> None:
    session = Session([KeyboardInterrupt, "never asked"])
    assert session.asked == []
    assert session.num_closed == 1


def test_an_error_leaves_the_history_clean() -> None:
    class Failing(Answer):
        def __iter__(self) -> Iterator[str]:
            raise Overloaded("queue full")

    session = Session(["a", "b"], Failing(), Answer("ok"))
    assert "[error: queue full]" in session.output
    assert [message["content"] for message in session.asked[1]] == ["b"]


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "a",
        f"/save {file}",
        "/reset",
        "b",
        "/system Rhyme.",
        "c",
        "/nonsense",
        "/save",
        "/",
        "/help",
        "/quit",
        "d",
    ]
    session = Session(lines, Answer("A"), Answer("B"), Answer("C"))
    assert json.loads(file.read_text()) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A"}]
    assert [message["content"] for message in session.asked[1]] == ["b"]
    assert [message["content"] for message in session.asked[2]] == ["Rhyme.", "c"]
    assert "unknown command /nonsense" in session.output
    assert "/reset" in session.output
    assert len(session.asked) == 3


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    session = Session(["a", f"/save {tmp_path}/none/talk.json"], Answer("A"))
    assert "cannot write" in session.output

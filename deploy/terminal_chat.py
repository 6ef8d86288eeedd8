"""`motet chat`: a conversation in the terminal, over the SDK.

Knows lines, commands and the history. Ctrl-C stops an answer; at the prompt it leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ..engine.config import HostConfig
from ..engine.errors import MotetError
from ..engine.frames import Progress

HELP = """\
  /help           this list
  /reset          forget the conversation
  /system TEXT    set the system message and start anew (without TEXT: none)
  /save FILE      write the conversation as JSON
  /quit           leave (Ctrl-D does too; Ctrl-C stops an answer)"""


class Stream(Protocol):
    """What an answer must be able to do; `pipelines.chat.ChatStream` can."""

    def __iter__(self) -> Iterator[str]: ...
    def close(self) -> None: ...


class TerminalChat:
    """The loop of one conversation. `ask(messages)` starts an answer; lines come from `read`, text goes to `write`."""

    def __init__(
        self,
        ask: Callable[[list[dict[str, Any]]], Stream],
        *,
        system: str | None = None,
        read: Callable[[str], str] = input,
        write: Callable[[str], None] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._read = read
        self._write = write or _write_now
        self._close = close

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> TerminalChat:
        """Load the model (saying so on stderr) and make the loop around it."""
        from ..pipelines.chat import Chat
        from ..pipelines.hub import Hub, default_model

        started = time.monotonic()
        model = namespace.model or default_model("llm")
        hub = Hub(HostConfig(models=(model,), threads=namespace.threads), on_progress=_tell_progress)
        try:
            chat = Chat(model, hub=hub)
        except BaseException:
            hub.close()
            raise
        _tell(f"{model} is ready after {time.monotonic() - started:.1f} s; /help lists the commands")

        def ask(messages: list[dict[str, Any]]) -> Stream:
            return chat.stream(
                messages, temperature=namespace.temperature, max_tokens=namespace.max_tokens, seed=namespace.seed
            )

        if sys.stdin.isatty():
            import readline  # noqa: F401  line editing and history for input()
        return cls(ask, system=namespace.system, close=hub.close)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, the system message first."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._turns]

    def run(self) -> int:
        try:
            while True:
                try:
                    line = self._read("> ").strip()
                except (EOFError, KeyboardInterrupt):
                    self._write("\n")
                    return 0
                if line.startswith("/"):
                    if self._command(*line[1:].split(maxsplit=1)) == "quit":
                        return 0
                elif line:
                    self._turn(line)
        finally:
            self._close()

    def _turn(self, line: str) -> None:
        """One question and its answer; what was said before an interrupt stays in the history."""
        self._turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        stream: Stream | None = None
        try:
            stream = self._ask(self.messages)
            for piece in stream:
                pieces.append(piece)
                self._write(piece)
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()
            self._write(" [stopped]")
        except MotetError as error:
            self._write(f"[error: {error}]")
        self._write("\n")
        if pieces:
            self._turns.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._turns.pop()

    def _command(self, name: str = "", argument: str = "") -> str:
        match name:
            case "quit" | "exit":
                return "quit"
            case "help":
                self._write(HELP + "\n")
            case "reset":
                self._turns.clear()
                self._write("the conversation is forgotten\n")
            case "system":
                self._system = argument.strip() or None
                self._turns.clear()
                self._write("the system message is set; the conversation starts anew\n")
            case "save":
                self._save(argument.strip())
            case _:
                self._write(f"unknown command /{name}; /help lists them\n")
        return name

    def _save(self, file: str) -> None:
        if not file:
            self._write("/save needs the name of a file\n")
            return
        try:
            Path(file).write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            self._write(f"cannot write {file}: {error.strerror}\n")
        else:
            self._write(f"{len(self.messages)} messages written to {file}\n")


def _tell(line: str) -> None:
    print(f"motet: {line}", file=sys.stderr, flush=True)


def _tell_progress(progress: Progress) -> None:
    _tell(f"{progress.model}: {progress.phase} ({progress.seconds:.1f} s)")


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

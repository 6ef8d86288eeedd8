"""The command line: `motet serve | chat | transcribe | speak | image | models | demo | bench`.

Reads arguments and configuration, then hands over to the server, the SDK or the demo. Never imports torch itself: the
server's process stays free of it, and `motet --help` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..engine.errors import MotetError
from ..models.registry import installed
from . import bench
from .config import ConfigError, MotetConfig, add_flags, build, merge, read_toml, set_values, to_toml

# Words that will be commands; until then each says so instead of looking like a typo.
RESERVED = {
    "talk": "a spoken conversation",
    "video": "short videos from text",
    "embed": "embeddings",
    "plan": "what fits on this machine",
    "tune": "find the best settings",
    "simulate": "replay a load without hardware",
    "explain": "why a request was slow",
    "quantize": "write a smaller checkpoint",
    "eval": "measure quality",
    "cost": "price of a load",
}

SOUND_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")  # of pipelines/sound_file.py, which brings the codecs
PICTURE_FORMATS = ("png", "jpeg", "webp")


class UsageError(Exception):
    """The command line cannot be read; exit status 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit status: 0 well, 1 an error, 2 a usage error, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in RESERVED:
        print(f"motet {arguments[0]}: not available yet in this version ({RESERVED[arguments[0]]})", file=sys.stderr)
        return 2
    try:
        parser = make_parser()
        namespace, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise UsageError(_unknown_argument(parser, arguments, unknown[0]))
        status = namespace.run(namespace)
        assert isinstance(status, int)
        return status
    except (UsageError, ConfigError) as error:
        print(f"motet: {error}", file=sys.stderr)
        return 2
    except MotetError as error:
        print(f"motet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone (`motet models | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def make_parser() -> argparse.ArgumentParser:
    later = ", ".join(RESERVED)
    parser = _Parser(
        prog="motet",
        description="One server and SDK for language, speech, vision and image models.",
        epilog=f"Not available yet in this version: {later}.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"motet {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    serve = commands.add_parser("serve", help="serve models over HTTP", allow_abbrev=False)
    serve.add_argument("model", nargs="*", metavar="MODEL", help="ids, .gguf files or directories; default: every "
                       "installed demo model, each loaded at first use")  # fmt: skip
    serve.add_argument("--config", type=Path, metavar="FILE.toml", help="read settings from a file; flags win over it")
    serve.add_argument("--print-config", action="store_true", help="print the resolved settings as TOML and stop")
    add_flags(serve, skip=frozenset({"host.models"}))
    serve.set_defaults(run=run_serve)

    chat = commands.add_parser("chat", help="talk to a model in this terminal", allow_abbrev=False)
    chat.add_argument("model", nargs="?", metavar="MODEL", help="default: the first installed chat model")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy (default: 0.7)")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: up to the context)")
    chat.add_argument("--seed", type=int, metavar="N", help="same seed, same answers")
    chat.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    chat.set_defaults(run=run_chat)

    speech = commands.add_parser(
        "transcribe", help="speech of files, folders or a microphone to text", allow_abbrev=False
    )
    speech.add_argument(
        "file", nargs="*", metavar="FILE|FOLDER", help="audio or video; folders are searched to their ends"
    )
    speech.add_argument("--mic", action="store_true", help="listen to the microphone instead")
    speech.add_argument("--model", metavar="MODEL", help="default: the first installed recogniser")
    speech.add_argument("--format", choices=("text", "srt", "vtt", "json"), default="text", help="default: text")
    speech.add_argument("--output", type=Path, metavar="DIR", help="write a file per input there (default: to stdout)")
    speech.add_argument("--language", metavar="XX", help="two letters (default: detected)")
    speech.add_argument("--translate", action="store_true", help="into English")
    speech.add_argument("--prompt", default="", metavar="TEXT", help="names and words that are likely to occur")
    speech.add_argument("--word-timestamps", action="store_true", help="times of every word (in json)")
    speech.add_argument(
        "--max-chars", type=int, default=0, metavar="N", help="split subtitles after so many characters"
    )
    speech.add_argument("--diarize", action="store_true", help="say who speaks")
    speech.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    speech.set_defaults(run=run_transcribe)

    voice = commands.add_parser("speak", help="text to speech", allow_abbrev=False)
    voice.add_argument("text", nargs="?", metavar="TEXT", help="what to say; - is stdin, spoken while it comes")
    voice.add_argument("-o", "--output", metavar="FILE", help="default: speech.wav here; - is raw sound on stdout")
    voice.add_argument("--format", choices=SOUND_FORMATS, help="default: by the file's name; pcm on stdout (16 bit, "
                       "24 kHz, mono)")  # fmt: skip
    voice.add_argument("--model", metavar="MODEL", help="default: the first installed voice")
    voice.add_argument("--voice", metavar="NAME", help="one of the model's voices (default: its first)")
    voice.add_argument("--list-voices", action="store_true", help="print the model's voices and stop")
    voice.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="0.25 to 4, at the same pitch (default: 1)"
    )
    voice.add_argument("--temperature", type=float, metavar="X", help="default: the voice's own")
    voice.add_argument("--seed", type=int, metavar="N", help="same seed, same sound")
    voice.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    voice.set_defaults(run=run_speak)

    image = commands.add_parser("image", help="pictures from text", allow_abbrev=False)
    image.add_argument("prompt", metavar="PROMPT", help="what to see; - is stdin")
    image.add_argument(
        "-o", "--output", metavar="FILE", help="default: picture.png here; several are numbered; - is stdout"
    )
    image.add_argument("--format", choices=PICTURE_FORMATS, help="default: by the file's name")
    image.add_argument("--quality", type=int, metavar="N", help="0 to 100, of jpeg and webp (default: 95)")
    image.add_argument("--model", metavar="MODEL", help="default: the first installed one that makes pictures")
    image.add_argument("-n", type=int, default=1, metavar="N", help="so many pictures (default: 1)")
    image.add_argument("--size", metavar="WxH", help="one of the model's sizes (default: its first)")
    image.add_argument("--steps", type=int, metavar="N", help="default: the model's own")
    image.add_argument("--seed", type=int, metavar="N", help="same seed, same picture (default: drawn, and told)")
    image.add_argument("--negative", metavar="TEXT", help="what shall not be seen")
    image.add_argument("--guidance", type=float, metavar="X", help="how closely the prompt is followed (default: the "
                       "model's own)")  # fmt: skip
    image.add_argument("--solver", metavar="NAME", help="default: the model's own")
    image.add_argument("--image", metavar="FILE", help="a picture to begin with")
    image.add_argument("--strength", type=float, metavar="X", help="with --image: near 0 keeps it, 1 forgets it "
                       "(default: 0.8)")  # fmt: skip
    image.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    image.set_defaults(run=run_image)

    models = commands.add_parser("models", help="list the models that can be named", allow_abbrev=False)
    models.set_defaults(run=run_models)

    demo = commands.add_parser("demo", help="serve the packaged model, ask it, show figures", allow_abbrev=False)
    demo.add_argument("--serve", action="store_true", help="keep the server running afterwards")
    demo.add_argument("--port", type=int, default=0, metavar="N", help="default: any free port")
    demo.set_defaults(run=run_demo)

    bench.add_parser(commands)
    return parser


def resolve(namespace: argparse.Namespace) -> MotetConfig:
    """The frozen tree for `serve`: defaults, then the file, then the flags. Raises ConfigError."""
    values = read_toml(namespace.config) if namespace.config else {}
    values = merge(values, set_values(namespace))
    if namespace.model:
        values = merge(values, {"host": {"models": namespace.model}})
    return build(MotetConfig, values)


def run_serve(namespace: argparse.Namespace) -> int:
    config = resolve(namespace)
    if namespace.print_config:
        print(to_toml(config).rstrip())
        return 0
    from .serve import serve

    return serve(config)


def run_chat(namespace: argparse.Namespace) -> int:
    from .terminal_chat import TerminalChat

    return TerminalChat.from_arguments(namespace).run()


def run_transcribe(namespace: argparse.Namespace) -> int:
    if bool(namespace.file) == namespace.mic:
        raise UsageError("transcribe: name files or folders, or say --mic")
    from .transcribe import run

    return run(namespace)


def run_speak(namespace: argparse.Namespace) -> int:
    if namespace.text is None and not namespace.list_voices:
        raise UsageError("speak: say what to speak, or - for the text on stdin")
    from .speak import run

    return run(namespace)


def run_image(namespace: argparse.Namespace) -> int:
    from .image import run

    return run(namespace)


def run_models(_: argparse.Namespace) -> int:
    rows = [("ID", "KIND", "PARAMETERS", "LICENCE", "STATE", "WHAT")]
    for spec in installed():
        try:
            spec.locate()
            state = "installed"
        except MotetError:
            state = "missing"
        millions = f"{spec.num_parameters / 1e6:,.1f} M"
        rows.append((spec.id, spec.kind, millions, spec.licence, state, spec.summary))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if len(rows) == 1:
        print("no models are installed; `make venv` installs the demo models", file=sys.stderr)
    return 0


def run_demo(namespace: argparse.Namespace) -> int:
    from .demo import run

    return run(port=namespace.port, keep_serving=namespace.serve)


def _unknown_argument(parser: argparse.ArgumentParser, arguments: list[str], word: str) -> str:
    """What to say about a flag that nobody knows, with the nearest known one."""
    known = list(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and arguments and arguments[0] in action.choices:
            known = list(action.choices[arguments[0]]._option_string_actions)
    near = difflib.get_close_matches(word.split("=")[0], known, n=1)
    return f"unknown argument {word}" + (f"; did you mean {near[0]}?" if near else f" (see `{parser.prog} --help`)")


if __name__ == "__main__":
    sys.exit(main())

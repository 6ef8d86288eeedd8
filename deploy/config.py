"""One TOML file and the command line become one frozen tree of dataclasses.

The leaves live beside their owners (engine/config.py, streaming/config.py); this file only knows how to read a frozen
dataclass: its fields, their types and defaults, and the comment beside each field, which is its help. Every flag of
`motet serve` is generated from the tree, so a new field is a new flag. Unknown keys are errors that suggest the nearest
name. Never imports torch.

The file has one table per branch of the tree:

    [host]
    models = ["smollm2-135m-instruct"]
    [host.engine]
    max_num_seqs = 32
    [server]
    port = 8000
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import math
import textwrap
import tokenize
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..engine.config import HostConfig
from ..engine.errors import InvalidRequest
from ..streaming.config import ServerConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MotetConfig:
    """The whole tree: what runs (host) and how it is reached (server)."""

    host: HostConfig
    server: ServerConfig


class ConfigError(InvalidRequest):
    """A key or value that cannot be: the message names it and says what was expected."""

    code = "invalid_config"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One settable value: where it is in the tree, and what it accepts."""

    path: tuple[str, ...]  # ("host", "engine", "max_num_seqs")
    type: Any
    default: Any  # dataclasses.MISSING when required
    help: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


# Flag names of vLLM whose meaning is the same, and the field they set (the others that Motet shares are field names).
ALIASES: dict[str, str] = {
    "--api-key": "server.api_keys",
    "--allowed-origins": "server.cors_origins",
    "--tensor-parallel-size": "host.engine.tp_size",
    "--num-gpu-blocks-override": "host.engine.num_blocks",
}

# Not settable: worked out from the others.
DERIVED = frozenset({"server.models"})


# ------------------------------------------------------------------------------------------------------ reading a tree


def leaves(cls: type[Any] = MotetConfig, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every settable value under a dataclass, depth first."""
    hints, helps = typing.get_type_hints(cls), _comments(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from leaves(hint, (*path, field.name))
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        leaf = Leaf(path=(*path, field.name), type=hint, default=default, help=helps.get(field.name, ""))
        if leaf.key not in DERIVED:
            yield leaf


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """A frozen dataclass from plain nested values. Raises ConfigError for unknown keys and unfit values."""
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if _join(path, field.name) not in DERIVED]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {_join(path, key)!r}{_suggest(key, names)}", param=_join(path, key))
    built: dict[str, Any] = {}
    for name in names:
        hint, where = hints[name], _join(path, name)
        if dataclasses.is_dataclass(hint):
            branch = values.get(name, {})
            if not isinstance(branch, Mapping):
                raise ConfigError(f"{where} must be a table, got {branch!r}", param=where)
            built[name] = build(typing.cast(type[Any], hint), branch, where)
        elif name in values:
            built[name] = fit(hint, values[name], where)
    try:
        return cls(**built)
    except (TypeError, ValueError) as error:  # a dataclass may check itself in __post_init__
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"[{path}]: {error}" if path else str(error), param=path or None) from error


def fit(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that a field declares, or ConfigError. Never guesses: "1" is not a number in a TOML file."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors = []
        for option in arguments:
            if option is not type(None):
                try:
                    return fit(option, value, where)
                except ConfigError as error:
                    errors.append(error)
        raise errors[0]
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, arguments))}, got {value!r}", param=where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} must be a list, got {value!r}", param=where)
        return tuple(fit(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {value!r}", param=where)
        return {fit(arguments[0], k, where): fit(arguments[1], v, _join(where, str(k))) for k, v in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    if hint is Any:
        return value
    raise ConfigError(f"{where} must be {_type_name(hint)}, got {value!r}", param=where)


def read_toml(path: Path) -> dict[str, Any]:
    """The file as plain nested values. Raises ConfigError when it is missing or not TOML."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


# ------------------------------------------------------------------------------------------------- flags from the tree


def add_flags(parser: argparse.ArgumentParser, *, skip: frozenset[str] = frozenset()) -> None:
    """One flag per leaf, named after its field (with its branch in front where two branches share a name)."""
    all_leaves = list(leaves())
    count = Counter(leaf.path[-1] for leaf in all_leaves)
    for leaf in all_leaves:
        if leaf.key in skip:
            continue
        name = leaf.path[-1] if count[leaf.path[-1]] == 1 else "_".join(leaf.path[-2:])
        flags = ["--" + name.replace("_", "-")]
        flags += [flag for flag, key in ALIASES.items() if key == leaf.key and flag not in flags]
        _add_flag(parser, leaf, flags)


def set_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the flags said, as nested values; flags that were not given are absent."""
    values: dict[str, Any] = {}
    for key, value in vars(namespace).items():
        if "." in key:
            *branches, name = key.split(".")
            table = values
            for branch in branches:
                table = table.setdefault(branch, {})
            table[name] = value
    return values


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values where `over` wins, table by table."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def to_toml(config: Any, path: str = "") -> str:
    """The tree as a TOML text that reads back to the same tree, but for secrets; None is written as a comment."""
    plain, branches = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if _join(path, field.name) in DERIVED:
            continue
        if dataclasses.is_dataclass(value):
            branches.append(to_toml(value, _join(path, field.name)))
        elif value is None:
            plain.append(f"# {field.name} is unset")
        else:
            plain.append(f"{field.name} = {_toml_value(value, secret=not field.repr)}")
    head = [f"[{path}]"] if path and plain else []
    return "\n".join([*head, *plain, *([""] if plain else []), *branches])


def _comments(cls: type[Any]) -> dict[str, str]:
    """The trailing comment of each field's line in the source of a dataclass; nothing when there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id: comments[node.end_lineno or node.lineno]
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in comments
    }


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _add_flag(parser: argparse.ArgumentParser, leaf: Leaf, flags: list[str]) -> None:
    hint = leaf.type
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = options[0]
    shown = "" if leaf.default in (dataclasses.MISSING, None, (), "") else f" (default: {leaf.default})"
    common: dict[str, Any] = {
        "dest": leaf.key,
        "default": argparse.SUPPRESS,
        "help": (leaf.help + shown).replace("%", "%%").strip(),
    }
    if hint is bool:
        parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        common["help"] += " (may be given several times)"
        parser.add_argument(*flags, action="append", type=item, metavar=_METAVARS[item], **common)
    elif typing.get_origin(hint) is Literal:
        parser.add_argument(*flags, choices=typing.get_args(hint), **common)
    elif hint in (int, float, str, Path):
        parser.add_argument(*flags, type=hint, metavar=_METAVARS[hint], **common)
    # Tables (dict fields) are for the file only.


def _toml_value(value: Any, *, secret: bool) -> str:
    if secret and value:
        return '"(hidden)"' if isinstance(value, str) else '["(hidden)"]'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml_value(item, secret=False) for item in value) + "]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_quote(str(k))} = {_toml_value(v, secret=False)}" for k, v in value.items())
        return "{" + inside + "}"
    return _quote(str(value))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    return names.get(hint, str(hint))

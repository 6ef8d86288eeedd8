"""A Jinja sandbox with a meter: any template ends within a time, an output and a step limit.

Chat templates come with the weights, so they are data of strangers. Jinja's own sandbox keeps them away from Python's
internals, but lets `{% for %}` in `{% for %}`, a macro that calls itself or `{% set s = s ~ s %}` run for ever or eat
all memory. Here every body that can be entered more than once (loops, macros, call blocks, blocks) begins with a tick
of the meter, every value that is made or written is counted, and the few operations that can blow up one value (`*`,
`**`, `+`, `~`, `%` on text, `replace`, `join`, `indent`, padding methods) are measured before they run or are missing.
No threads, no tracing, no signals: a render costs what it costs without the meter, plus a clock reading per loop turn
and call.

Does not know what messages or tokens are.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes, visitor
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE_CHARS = 1 << 20  # of a template's own text
_MAX_INDENT = 64
_MAX_POWER_BITS = 4096
_WORK_FACTOR = 16  # a template may trim, split and compare a text so many times before it is written
_TICK = "__tick__"
_SIZE = "__size__"
_WEIGH = "__weigh__"
_CONCAT = "__concat__"


class TemplateLimit(Exception):
    """The meter ran out: `what` says of which resource."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class TemplateRefusal(Exception):
    """The template itself refused the input, through `raise_exception`; or it is broken."""


class Meter:
    """Counts one render: characters written, and work, the sizes of all values made on the way."""

    __slots__ = ("chars", "deadline", "max_chars", "seconds", "work")

    def __init__(self, seconds: float, max_chars: int) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.chars = 0
        self.work = 0
        self.max_chars = max_chars

    def spend(self, chars: int, work: int = 0) -> None:
        self.chars += chars
        self.work += work
        if self.chars > self.max_chars or self.work > self.max_chars * _WORK_FACTOR:
            raise TemplateLimit(f"more than {self.max_chars} characters")
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"longer than {self.seconds:g} s")


_meter: ContextVar[Meter | None] = ContextVar("motet_template_meter", default=None)


def _limit() -> int:
    meter = _meter.get()
    return meter.max_chars if meter is not None else MAX_SOURCE_CHARS


def _fits(size: int) -> None:
    """`size` characters or elements of one value; measured before it is made."""
    if size > _limit():
        raise TemplateLimit(f"a value of {size} characters or elements")


def _fits_within(size: int, limit: int) -> None:
    if size > limit:
        raise TemplateLimit(f"a value of more than {limit} characters or elements")


def _spend(value: Any, chars: int, work: int = 0) -> Any:
    meter = _meter.get()
    if meter is not None:  # None: Jinja folds constants at compile time
        meter.spend(chars, work)
    return value


def _made(value: Any) -> Any:
    """Counts a value some operation made."""
    return _spend(value, 0, len(value) if isinstance(value, str | list | tuple | dict) else 0)


def _weigh(value: Any) -> Any:
    """Before a value is written, compared or hashed: lists that hold one list twice, and so on, are small to keep and
    endless to walk (`[x, x]` sixty times over), and Python walks them in one step that nobody can interrupt."""
    if not isinstance(value, _CONTAINERS):
        return value
    limit, size, stack = _limit(), 0, [value]
    while stack:
        item = stack.pop()
        size += len(item) + 1
        _fits_within(size, limit)
        for inner in item.values() if isinstance(item, dict) else item:
            if isinstance(inner, str):
                size += len(inner)
            elif isinstance(inner, _CONTAINERS):
                stack.append(inner)
    return _spend(value, 0, size)


def _counted(function: Callable[..., Any], *, weigh: bool) -> Callable[..., Any]:
    """A filter or test whose every call is metered, also from inside `map` and `select`."""

    @functools.wraps(function)  # also copies Jinja's marks (pass_context, pass_environment)
    def call(*args: Any, **kwargs: Any) -> Any:
        if weigh:
            for value in (*args, *kwargs.values()):
                _weigh(value)
        return _made(function(*args, **kwargs))

    return call


# -------------------------------------------------------------------------------------------------- guarded operations


def _size(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return 0


def _add(left: Any, right: Any) -> Any:
    _fits(_size(left) + _size(right))
    return operator.add(left, right)


def _multiply(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and not isinstance(other, int | float):
            _fits(max(one, 0) * _size(other))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_POWER_BITS:
        raise TemplateLimit("a number too large")
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_POWER_BITS:
        raise TemplateLimit("a number too large")
    return operator.pow(left, right)


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        raise SecurityError("formatting with % is not available in chat templates")
    return operator.mod(left, right)


_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": _add, "*": _multiply, "**": _power, "%": _modulo}


def _concat(parts: Iterable[Any]) -> str:
    texts = [str(_weigh(part)) for part in parts]
    _fits(sum(map(len, texts)))
    return "".join(texts)


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    limit = -1 if count is None else int(count)
    found = text.count(old) if limit < 0 else min(text.count(old), limit)
    _fits(len(text) + found * max(len(new) - len(old), 0))
    return text.replace(old, new, limit)


def _join(values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = [value[attribute] for value in values]
    texts = [str(_weigh(value)) for value in values]
    separator = str(separator)
    _fits(sum(map(len, texts)) + len(separator) * max(len(texts) - 1, 0))
    return separator.join(texts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(max(int(width), 0), _MAX_INDENT)
    text = str(text)
    _fits(len(text) + len(prefix) * (text.count("\n") + 1))
    lines = text.split("\n")
    out = [prefix + line if (line or blank) and (index or first) else line for index, line in enumerate(lines)]
    return "\n".join(out)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own: no HTML escapes, the options of `json.dumps` as the models' authors expect them."""
    width = None if indent is None else min(max(int(indent), 0), _MAX_INDENT)
    _weigh(value)
    out = []
    size = 0
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)
    for chunk in encoder.iterencode(value):
        size += len(chunk)
        _fits(size)
        _spend(None, 0)
        out.append(chunk)
    return "".join(out)


class _Namespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # not its content: namespaces in namespaces have no end


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _refuse(message: Any) -> None:
    raise TemplateRefusal(str(message)[:500])


def _now(format: str) -> str:
    if len(format) > 100:
        raise SecurityError("strftime_now: format longer than 100 characters")
    return datetime.now().strftime(format)


# ------------------------------------------------------------------------------------------------------- the compiler

# What chat templates use. Absent on purpose: format, center, slice, batch, sum, round, urlize, wordwrap, pprint, attr,
# random, xmlattr, filesizeformat (each can blow up a value or reach where it should not), and random is not a prompt's.
_FILTERS = frozenset(
    "abs capitalize count d default dictsort e escape first float forceescape groupby int items join last length list "
    "lower map max min reject rejectattr replace reverse safe select selectattr sort string striptags title trim "
    "truncate unique upper wordcount".split()
)
# These look at no element, or weigh for themselves; all other filters may walk their whole value.
_LISTS = frozenset(
    "d default first items join last length list count map reject rejectattr reverse select selectattr safe".split()
)
_COMPARING_TESTS = frozenset("eq ne lt le gt ge == != < <= > >= equalto lessthan greaterthan in".split())
# Methods of str that can blow up a value; `replace` and `join` come back guarded.
_STR_METHODS = frozenset("center ljust rjust zfill expandtabs format format_map translate encode maketrans".split())


class _Generation(Extension):
    """`{% generation %}`: marks the model's own words for training; here it only passes its body on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(_OPERATORS)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _made(_OPERATORS[operator](left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _metered(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str):
            return _str_method(obj, attribute) or super().getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        # `text['replace']` finds the same method as `text.replace`.
        if isinstance(obj, str) and isinstance(argument, str):
            return _str_method(obj, argument) or super().getitem(obj, argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(__obj, Macro | LoopContext):
            for value in (getattr(__obj, "__self__", None), *args):
                _weigh(value)  # `list.index(x)`, `dict.get(x)`
        return _made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _STR_METHODS:
            return False
        if isinstance(obj, int) and attr in ("to_bytes", "from_bytes"):
            return False
        return super().is_safe_attribute(obj, attr, value)


def _str_method(text: str, name: str) -> Any:
    if name == "replace":
        return lambda old, new, count=None: _replace(text, old, new, count)
    if name == "join":
        return lambda values: _join(values, text)
    return None


def _metered(tree: nodes.Template) -> nodes.Template:
    """Ticks at the head of every body that can be entered again, and a measured `~`."""
    node: Any  # all four have a body
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        chars = sum(_fixed_chars(child) for child in node.body)
        tick = _filtered(nodes.Const(None), _TICK, node.lineno, nodes.Const(chars))
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:  # it runs for turns that never reach the body
            node.test = _filtered(cast(nodes.Expr, node.test), _TICK, node.lineno, nodes.Const(0))
    return cast(nodes.Template, _Values().visit(tree))


def _filtered(value: nodes.Expr, name: str, line: int, *args: nodes.Expr) -> nodes.Filter:
    node = nodes.Filter(value, name, list(args), [], None, None)
    return cast(nodes.Filter, node.set_lineno(line))


def _fixed_chars(node: nodes.Node) -> int:
    """Characters of literal text under `node`; Jinja writes them without asking `finalize` at run time."""
    size = 0
    for found in [node, *node.find_all((nodes.TemplateData, nodes.Const))]:
        if isinstance(found, nodes.TemplateData):
            size += len(found.data)
        elif isinstance(found, nodes.Const) and isinstance(found.value, str):
            size += len(found.value)
    return size


class _Values(visitor.NodeTransformer):
    """Measures what calls no filter, method or operator: `~`, slices, comparisons, keys."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _weighed(node.arg)
            return node
        return _filtered(node, _SIZE, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _weighed(node.key)
        return node


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, _WEIGH, node.lineno)


def _written(value: Any) -> Any:
    """Jinja's finalize hook: sees every value on its way into the output."""
    text = value if isinstance(value, str) else str(_weigh(value))
    return _spend(text, len(text))


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written, cache_size=0
    )
    filters = {name: function for name, function in environment.filters.items() if name in _FILTERS}
    filters.update(replace=_replace, join=_join, indent=_indent, tojson=_to_json)
    environment.filters = {name: _counted(function, weigh=name not in _LISTS) for name, function in filters.items()}
    environment.filters[_CONCAT] = _counted(_concat, weigh=False)
    environment.filters[_SIZE] = _made
    environment.filters[_WEIGH] = _weigh
    environment.tests.update(
        {name: _counted(cast(Any, environment.tests[name]), weigh=True) for name in _COMPARING_TESTS}
    )
    environment.filters[_TICK] = _tick
    environment.globals.pop("lipsum", None)
    environment.globals.update(namespace=_Namespace, raise_exception=_refuse, strftime_now=_now)
    return environment


@jinja2.pass_context
def _tick(context: Any, value: Any, chars: int) -> Any:
    # `pass_context` keeps Jinja from folding the call away at compile time.
    return _spend(value, chars)


class MeteredTemplate:
    """A compiled template. Immutable; `render` may run in several threads at once.

    Raises `TemplateRefusal` when the source does not compile.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateRefusal(f"its source has {len(source)} characters, at most {MAX_SOURCE_CHARS} are allowed")
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateRefusal(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, TemplateLimit, SyntaxError, ValueError, MemoryError) as error:
            raise TemplateRefusal(f"it does not compile ({type(error).__name__})") from None

    def render(self, variables: Mapping[str, Any], *, seconds: float, max_chars: int) -> str:
        """The text. Raises `TemplateLimit` (time, size, depth) or `TemplateRefusal` (the template's own complaint)."""
        token = _meter.set(Meter(seconds, max_chars))
        try:
            return self._template.render(variables)
        except RecursionError:
            raise TemplateLimit("calls nested too deep") from None
        except MemoryError:
            raise TemplateLimit("more memory than there is") from None
        except TemplateRefusal:
            raise
        except jinja2.TemplateError as error:
            raise TemplateRefusal(_short(error)) from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise TemplateRefusal(_short(error)) from None
        finally:
            _meter.reset(token)


def _short(error: Exception) -> str:
    """A message without object addresses, cut to one line."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(error)).split("\n")[0][:300] or type(error).__name__

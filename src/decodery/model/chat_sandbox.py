"""A Jinja environment in which an untrusted template can neither reach the program nor exhaust the machine."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Filters whose result is no larger than what they are given, up to a small factor.
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby"),
    *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse"),
    *("round", "safe", "select", "selectattr", "sort", "string", "striptags", "sum", "title", "trim", "truncate"),
    *("unique", "upper", "urlencode", "wordcount"),
)
# Those that can make much of little; `_growth` says how much.
_GROWING = ("join", "replace", "indent", "center", "tojson", "batch")
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_WIDEST = 1000
_WIDE_NUMBER = re.compile(r"\d{4,}|\*|:[^}]*\{")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Counts what a template does: every call, operation and loop turn is a step, every text made has a length.

    The syntax is what chat templates are written for: blocks trimmed, `break` and `continue`, `{% generation %}`.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, most_steps: int, most_characters: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation])
        self.most_steps, self.most_characters = most_steps, most_characters
        self.steps = self.characters = 0
        self.filters["tojson"] = _to_json
        chosen = {name: self.filters[name] for name in (*_FILTERS, *_GROWING)}
        self.filters = {name: self._bounded(name, call) for name, call in chosen.items()}
        self.filters |= {"_charged": self.charged, "_counted": self._counted, "_joined": self._joined}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def from_source(self, source: str) -> Any:
        """Compile a template whose operations are counted."""
        return self.from_string(_Instrument().visit(self.parse(source)))

    def render(self, template: Any, variables: dict[str, Any]) -> str:
        """The text of a template made by `from_source`."""
        self.steps = self.characters = 0
        return "".join(template.generate(variables))

    def charged(self, value: Any) -> Any:
        """Count `value`, whatever it holds inside; an error where the template has made too much."""
        self.steps += 1
        rest = [value]
        while rest:
            item = rest.pop()
            if isinstance(item, str | bytes):
                self.characters += len(item)
            elif isinstance(item, int):
                self.characters += item.bit_length() // 4
            elif isinstance(item, list | tuple | set):
                self.steps += len(item)
                rest.extend(item)
            elif isinstance(item, dict):
                self.steps += len(item)
                rest.extend(item)
                rest.extend(item.values())
            if self.steps > self.most_steps or self.characters > self.most_characters:
                raise SecurityError("the template does more than any chat template needs")
        return value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.charged([*args, *kwargs.values()])
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            self._expect(_growth(obj.__name__, [owner, *args, *kwargs.values()]))
        return self.charged(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 2**64 and abs(right) < 64):
            raise SecurityError("the template raises a number to a power too high")
        if operator == "*":
            sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
            if isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
                self._expect(sizes[0] * sizes[1])
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            self._expect(_formatted(left, values))
        return self.charged(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Grows a text by a table, and no template needs it.
        return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._expect(_formatted(value.__self__, [*args, *kwargs.values()]))
            return self.charged(wrapped(*args, **kwargs))

        return bounded

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = [*args[skip:], *kwargs.values()]
            if name in ("join", "list", "sort", "unique", "reverse"):
                # A generator is listed here, so that its turns are counted and its content can be weighed.
                given[0] = list(self._counted(given[0])) if not isinstance(given[0], str) else given[0]
                args = (*args[:skip], given[0], *args[skip + 1 :])
            self._expect(_growth(name, given))
            self.charged(given[1:])
            return self.charged(function(*args, **kwargs))

        return bounded

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.charged(None)
            yield item

    def _joined(self, parts: list[Any]) -> str:
        return "".join(map(str, parts))

    def _expect(self, size: float) -> None:
        """Refuse a text of `size` characters before it is made."""
        if self.characters + size > self.most_characters:
            raise SecurityError("the template makes a text longer than any chat")


def _growth(name: str, given: list[Any]) -> float:
    """At most how many characters a filter or a method of a text makes of its arguments, itself the first."""
    numbers = [value for value in given[1:] if isinstance(value, int)]
    if any(number > _WIDEST for number in numbers) and name in (*_PADDING, "indent", "tojson", "batch"):
        raise SecurityError(f"the template asks {name} for a width of {max(numbers)}")
    lengths = [len(value) if isinstance(value, str) else 0 for value in given]
    if name == "replace" and len(given) > 2:
        return (lengths[0] / max(1, lengths[1]) + 1) * lengths[2] + lengths[0]
    if name == "join":
        separator, items = (given[0], given[1]) if isinstance(given[0], str) and len(given) > 1 else ("", given[0])
        items = items if isinstance(items, list | tuple) else []
        longest = max(lengths)
        return sum(len(item) if isinstance(item, str) else 0 for item in items) + (len(separator) + longest) * len(
            items
        )
    if name in ("indent", "tojson", "expandtabs"):
        widest = max([4, *numbers, *lengths[1:]])
        return 0 if not lengths[0] else lengths[0] * widest
    return sum(lengths)


def _formatted(layout: str, values: Iterable[Any]) -> float:
    if _WIDE_NUMBER.search(layout):
        raise SecurityError("the template formats a text with a width too large")
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    return (layout.count("%") + layout.count("{") + 1) * (longest + _WIDEST) + len(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(layout: str) -> str:
    if _WIDE_NUMBER.search(layout):
        raise SecurityError("the template formats a date with a width too large")
    return datetime.now().strftime(layout)


class _Instrument(NodeTransformer):
    """Wraps what makes or walks values, and is not a call or an operator, in a filter that counts it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List([_filtered(part, "_charged") for part in node.nodes])
        return _filtered(_filtered(parts, "_joined"), "_charged")

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, "_charged") for part in node.nodes
        ]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_charged")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_charged")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_charged") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_charged")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_charged")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_charged") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Generation(ext.Extension):
    """`{% generation %}` marks what the model says, for training; here its content is all that counts."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

"""The process in which chat templates are rendered: they come with a model and are not trusted.

It is run as a file by a `WorkerPool`, which bounds its time and memory, so that nothing but Jinja is loaded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_REASON = 500
"""Characters of what a template says when it refuses."""


def begin() -> Callable[[dict[str, Any]], dict[str, str]]:
    return answer


def answer(question: dict[str, Any]) -> dict[str, str]:
    """`text`, or why there is none.

    `invalid`: the template is wrong. `refused` or `failed`: with these messages.

    Args:
        question: `source`, `given` (variables by name) and `most`, how many characters the text may have.
    """
    try:
        template = _compiled(question["source"])
    except MemoryError:
        raise
    except Exception as error:
        # Not TemplateError alone: nesting ends in RecursionError, odd names in SyntaxError of the code that is made.
        return {"invalid": _reason(error)}
    parts, size = [], 0
    try:
        for part in template.generate(question["given"]):
            parts.append(part)
            size += len(part)
            if size > question["most"]:
                return {"failed": "it makes far more text of them than any template"}
    except MemoryError:
        raise
    except jinja2.TemplateError as error:
        return {"refused": _reason(error)}
    except Exception as error:
        # A template can call every method of texts, numbers and lists, so that its mistakes are of any kind.
        return {"failed": _reason(error)}
    return {"text": "".join(parts)}


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    """The syntax chat templates are written in: blocks trimmed, `break` and `continue`, `{% generation %}`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _reason(error: Exception) -> str:
    """What an error says, in one line."""
    said = str(error)[:_MOST_REASON] if not isinstance(error, KeyError) else f"there is no {error}"[:_MOST_REASON]
    return " ".join(said.split()) or type(error).__name__


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _Generation(ext.Extension):
    """`{% generation %}` marks what the model says, for training; here its content is all that counts."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

"""Docstrings in sections, as the command line and the reference pages show them."""

from __future__ import annotations

import inspect
import re
from typing import Any

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Shape", "References", "Example")
LISTS = ("Args", "Attributes", "Raises")
"""Sections of entries `name: text`; the others hold running text."""
_HEADING = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.MULTILINE)
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


def split(doc: str | None) -> tuple[str, dict[str, str]]:
    """Summary and description of a docstring, and the text of each of its sections without indentation."""
    text, *parts = _HEADING.split(inspect.cleandoc(doc or ""))
    return text.rstrip(), {
        heading: inspect.cleandoc(body) for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }


def entries(section: str) -> dict[str, str]:
    """The entries of a list section, by name, each text in one line."""
    _, *parts = ENTRY.split(section)
    return {
        name: " ".join(text.split())
        for names, text in zip(parts[::2], parts[1::2], strict=True)
        for name in names.split(", ")
    }


def field_texts(cls: type[Any]) -> dict[str, str]:
    """What the `Attributes` of a class and of its bases say, by field; the most derived class counts."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= entries(split(base.__doc__)[1].get("Attributes", ""))
    return found

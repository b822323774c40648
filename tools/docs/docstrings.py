"""Docstrings and signatures as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_SECTION = re.compile(
    r"(Args|Arguments|Attributes|Raises|Returns|Yields|Shape|References|Examples?|Notes?|Warns|See Also):"
)
_LISTED = {"Args", "Arguments", "Attributes", "Raises", "Warns", "Shape"}
"""Sections whose entries begin with a name and a colon."""
ARGUMENTS = ("Args", "Arguments", "Attributes")
_ENTRY = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \(([^)]*)\))?: ?(.*)")


def markdown(found: Any, without: Collection[str] = ()) -> str:
    """A docstring, Google sections as lists, indented code as blocks."""
    return docstring_markdown(inspect.getdoc(found) or "", without)


def arguments(found: Any) -> dict[str, str]:
    """The texts of a docstring's arguments, by name."""
    texts = dict[str, str]()
    for title, lines in _sections(inspect.getdoc(found) or ""):
        if title in ARGUMENTS:
            for item in _entries(lines):
                names, _, text = item.removeprefix("- ").partition(": ")
                texts |= dict.fromkeys(re.findall(r"`(\w+)`", names), text)
    return texts


def docstring_markdown(text: str, without: Collection[str] = ()) -> str:
    """The same of a text. without: titles of sections that are left out."""
    parts = []
    for title, lines in _sections(text):
        if title in without:
            continue
        if not title:
            parts.append(_body(lines))
        elif title in _LISTED:
            parts.append(f"**{title}**\n\n" + "\n".join(_entries(lines)))
        elif title.startswith("Example"):
            parts.append(f"**{title}**\n\n" + _code(lines))
        else:
            parts.append(f"**{title}**\n\n{_body(lines)}")
    return "\n\n".join(part for part in parts if part)


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each section's title and lines, without its indentation; the part before the first one has no title."""
    title, lines = "", list[str]()
    for line in text.splitlines():
        if heading := _SECTION.fullmatch(line.rstrip()):
            yield title, lines
            title, lines = heading[1], []
        elif title and line and not line.startswith(" "):
            yield title, lines
            title, lines = "", [line]
        else:
            lines.append(line[4:] if title else line)
    yield title, lines


def _entries(lines: list[str]) -> Iterator[str]:
    """The items of a list: one per name, continued by deeper lines."""
    item = ""
    for line in lines:
        entry = None if line.startswith(" ") else _ENTRY.fullmatch(line)
        if entry:
            yield from filter(None, [item])
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            typed = f" ({escaped(entry[2])})" if entry[2] else ""
            item = f"- {names}{typed}: {escaped(entry[3])}".rstrip()
        elif line.strip():
            item = f"{item} {escaped(line.strip())}" if item else f"- {escaped(line.strip())}"
    yield from filter(None, [item])


def _body(lines: list[str]) -> str:
    """Paragraphs; a block that is indented after a blank line is code."""
    parts: list[tuple[bool, list[str]]] = []
    for line in lines:
        code = line.startswith("    ") and bool(parts) and (parts[-1][0] or not parts[-1][1] or not parts[-1][1][-1])
        if not parts or (parts[-1][0] != code and line.strip()):
            parts.append((code, []))
        parts[-1][1].append(line)
    return "\n\n".join(
        _code(block) if code else "\n".join(escaped(line) for line in block).strip("\n") for code, block in parts
    ).strip()


def _code(lines: list[str]) -> str:
    return "```python\n" + inspect.cleandoc("\n".join(["", *lines])).strip("\n") + "\n```"


def escaped(line: str) -> str:
    """A line in which nothing but code spans is markup."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in re.split(r"(`[^`]*`)", line)
    )


def call(name: str, function: Any, defaults: Mapping[str, Any] | None = None) -> str:
    """The call, one line if it fits in 100 columns, else one parameter a line.

    defaults: of the keys of `**settings: Unpack[...]`, which are listed then.
    """
    signature = inspect.signature(function)
    parameters, starred = list[str](), False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not starred:
            parameters.append("*")
        starred = starred or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        unpacked = each.kind is each.VAR_KEYWORD and defaults is not None
        parameters += _unpacked(each, function, defaults or {}) if unpacked else [_parameter(each)]
    returned = signature.return_annotation
    result = "" if returned is signature.empty or isinstance(function, type) else f" -> {shown_type(returned)}"
    short = f"{name}({', '.join(parameters)}){result}"
    if len(short) <= 100:
        return short
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){result}"


def _unpacked(parameter: inspect.Parameter, function: Any, defaults: Mapping[str, Any]) -> list[str]:
    """The keys that `**settings: Unpack[Keys]` stands for; the parameter itself if it stands for any."""
    found = re.fullmatch(r"Unpack\[(\w+)\]", shown_type(parameter.annotation))
    keys = found and inspect.unwrap(function).__globals__.get(found[1])
    if not keys:
        return [_parameter(parameter)]
    annotations = {name: each for base in reversed(_bases(keys)) for name, each in base.__annotations__.items()}
    return [
        f"{name}: {shown_type(each)} = {_value(defaults[name]) if name in defaults else '...'}"
        for name, each in annotations.items()
    ]


def _bases(keys: Any) -> list[Any]:
    return [
        keys,
        *(base for each in getattr(keys, "__orig_bases__", ()) if hasattr(each, "__total__") for base in _bases(each)),
    ]


def _parameter(parameter: inspect.Parameter) -> str:
    empty, star = parameter.empty, {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is empty else f": {shown_type(parameter.annotation)}"
    return f"{star}{parameter.name}{typed}" + ("" if parameter.default is empty else f" = {_value(parameter.default)}")


def _value(default: Any) -> str:
    if isinstance(default, str):
        return '"' + default.replace("\n", "\\n") + '"'
    # Functions, default factories and objects without a text of their own.
    return "..." if callable(default) or str(default).startswith("<") else str(default)


def shown_type(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(getattr(annotation, "__forward_arg__", annotation)).replace("'", "").replace("typing.", "")

"""What is in the box, read from the source files: naming it must not cost the import of PyTorch."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .tables import statements, tables_of

_ROOT = Path(__file__).parent
_MARKS = ("\n@register(", "\n__all__ = ")
"""What stands in a file that has something to show; the others are not parsed."""


@dataclass(frozen=True)
class Description:
    """What one method says of itself. paper and year are None where there is no source.

    needs, gives: its tables in words, see `core.needs`; needs ends with what it was registered with. slower: see
    `registry.register`.
    """

    name: str
    family: str
    paper: str | None
    year: int | None
    guarantee: str
    lossless: bool
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    slower: bool
    summary: str

    def as_dict(self) -> dict[str, Any]:
        """What `decodery methods --json` prints of it."""
        values = {field.name: getattr(self, field.name) for field in fields(Description)}
        return values | {"needs": list(self.needs), "gives": list(self.gives)}


def facts(
    name: str,
    *,
    paper: str = "",
    guarantee: str = "",
    lossless: bool = False,
    needs: Any = (),
    doc: str | None = None,
    slower: bool = False,
    tables: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> dict[str, Any]:
    """The fields of a `Description` but its family, from the arguments of `register`, docstring and tables."""
    year = re.search(r"\((\d{4})\)\s*$", paper)
    return {
        "name": name,
        "paper": paper or None,
        "year": int(year[1]) if year else None,
        "guarantee": guarantee or ("the law of the output is unchanged" if lossless else "changes the output"),
        "lossless": lossless,
        "needs": (*tables[0], *needs),
        "gives": tables[1],
        "slower": slower,
        "summary": inspect.cleandoc(doc or "").partition("\n")[0],
    }


class Entry(NamedTuple):
    """Where a method is: the module that defines it, and the name of its class there."""

    described: Description
    module: str
    cls: str


@cache
def catalogue(family: str) -> dict[str, Entry]:
    """By name, sorted: the methods a family's package defines; no module is imported.

    Raises ValueError where the arguments of a `@register(...)` are no literals.
    """
    found = [
        Entry(described, module, cls)
        for module, body in _parsed(family)
        for described, cls in _registered(body, family, module)
    ]
    return {entry.described.name: entry for entry in sorted(found, key=lambda entry: entry.described.name)}


@cache
def shown(family: str) -> dict[str, str]:
    """What a family's package shows by name, and the module that has it: its methods' classes, and what `__all__` of
    its modules names beside them; sorted, no module is imported."""
    found = {entry.cls: entry.module for entry in catalogue(family).values()}
    for module, body in _parsed(family):
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= dict.fromkeys(ast.literal_eval(node.value), module)
    return dict(sorted(found.items()))


@cache
def _parsed(family: str) -> list[tuple[str, list[ast.stmt]]]:
    """Name and statements of the modules that have something to show."""
    found = []
    for path in sorted(_ROOT.joinpath(*family.split(".")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.stem != "__init__" and any(mark in source for mark in _MARKS):
            module = f"{__package__}.{family}.{path.stem}"
            found.append((module, statements(module)))
    return found


def _registered(body: list[ast.stmt], family: str, module: str) -> Iterator[tuple[Description, str]]:
    for node in body:
        for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "register":
                assert isinstance(node, ast.ClassDef)
                (name,) = (ast.literal_eval(value) for value in mark.args)
                given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in mark.keywords}
                given = {key: value for key, value in given.items() if key not in ("texts", "local")}
                tables = tables_of(node, module)
                said = facts(name, doc=ast.get_docstring(node), tables=tables, **given)
                yield Description(family=family, **said), node.name

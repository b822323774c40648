"""The tables of needs and gives that classes declare, read from their source: nothing is imported for it.

A class says `requirements = Needs(...)`, or has a property whose value depends on its settings; then the table tells
what may be needed. What a class does not say its bases say.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from decodery.core.requirements import USUAL, in_words

SOURCES = Path(__file__).parents[1] / "src" / "decodery"


def tables_of(node: ast.ClassDef, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a class of a module of this package needs and gives, in words."""
    requirements, provides = _told(node, module, "requirements"), _told(node, module, "provides")
    return tuple(requirements.values()), tuple(words for name, words in provides.items() if name not in USUAL)


def _told(node: ast.ClassDef, module: str, table: str, own: bool = True) -> dict[str, str]:
    """By field: the words for it."""
    said = [each for each in node.body if _declares(each, table)]
    if not said:
        return _inherited(node, module, table)
    text = ast.unparse(said[0])
    found = _inherited(node, module, table) if f"super().{table}" in text else {}
    if f"{table.title()}.merged(" in text and ".parts" in text:
        found["composed"] = "what its parts need" if table == "requirements" else "what its parts provide"
    for call in ast.walk(said[0]):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in (table.title(), "replace"):
            for keyword in call.keywords:
                _take(found, str(keyword.arg), keyword.value, own)
    return found


def _declares(statement: ast.stmt, table: str) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name == table
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == table


def _take(found: dict[str, str], name: str, value: ast.expr, own: bool) -> None:
    """Add a field; one whose value depends on settings only where the class itself says so."""
    try:
        given = ast.literal_eval(value)
    except ValueError:
        if own:
            found[name] = in_words(name, ())
        return
    if given:
        found[name] = in_words(name, given)


def _inherited(node: ast.ClassDef, module: str, table: str) -> dict[str, str]:
    for base, where in _bases(node, module):
        if any(_declares(each, table) for each in base.body):
            return _told(base, where, table, own=False)
    return {}


def _bases(node: ast.ClassDef, module: str) -> list[tuple[ast.ClassDef, str]]:
    """The classes that a class derives from, in the order in which Python asks them: what several share comes last."""
    found: list[tuple[ast.ClassDef, str]] = []
    for base in node.bases:
        if (known := _class(ast.unparse(base), module)) is not None:
            found += [known, *_bases(*known)]
    return list(dict.fromkeys(reversed(found)))[::-1]


@cache
def statements(module: str) -> list[ast.stmt]:
    """What a module of this package consists of; parsed once."""
    path = SOURCES.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body


def _class(name: str, module: str) -> tuple[ast.ClassDef, str] | None:
    """A class by the name a module knows it under, and the module of this package that defines it."""
    for each in statements(module):
        if isinstance(each, ast.ClassDef) and each.name == name:
            return each, module
        if isinstance(each, ast.ImportFrom) and name in [alias.name for alias in each.names]:
            above = module.split(".")[: -each.level] if each.level else []
            home = ".".join([*above, *(each.module or "").split(".")])
            return _class(name, home) if home.startswith("decodery.") else None
    return None

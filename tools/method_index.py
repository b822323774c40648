"""Writes `src/decodery/core/methods.json`, the static index of methods, and the stubs of their packages.

`python tools/method_index.py` writes them, `--check` only tells whether they are up to date.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from decodery.core.catalogue import FAMILIES, Description, Entry, facts

sys.path.insert(0, str(Path(__file__).parent))
# Beside this file, wherever it is run from.
from requirement_tables import SOURCES, lacks_setting, statements, tables_of

INDEX = SOURCES / "core" / "methods.json"
_MARKS = ("\n@register(", "\n__all__ = ")
"""What stands in a file that has something to show; the others are not parsed."""


def index() -> str:
    """The index, as JSON. Raises ValueError where the arguments of a `@register(...)` are no literals."""
    found = {
        family: {"methods": [_plain(each) for each in _methods(family)], "exports": _exports(family)}
        for family in FAMILIES
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def stubs() -> dict[Path, str]:
    """The stub of every package of methods: its names and where they come from."""
    return {
        SOURCES.joinpath(*package.split("."), "__init__.pyi"): _stub(family)
        for family, package in FAMILIES.items()
        if _exports(family)
    }


def _stub(family: str) -> str:
    package = FAMILIES[family]
    inner = [name for parent, _, name in (each.rpartition(".") for each in FAMILIES.values()) if parent == package]
    lines = ["# Written by tools/method_index.py.", *(f"from . import {name} as {name}" for name in inner)]
    lines += [f"from .{home.rpartition('.')[2]} import {name} as {name}" for name, home in _exports(family).items()]
    return "\n".join(lines) + "\n"


def _plain(entry: Entry) -> dict[str, Any]:
    said = asdict(entry.described)
    del said["family"]
    return {**said, "module": entry.module, "cls": entry.cls}


@cache
def _methods(family: str) -> list[Entry]:
    """The methods a family's package defines, sorted by name."""
    found = [
        Entry(described, module, cls)
        for module, body in _parsed(family)
        for described, cls in _registered(body, family, module)
    ]
    return sorted(found, key=lambda entry: entry.described.name)


@cache
def _exports(family: str) -> dict[str, str]:
    """What a family's package exports by name, and the module that has it, sorted."""
    found = {entry.cls: entry.module for entry in _methods(family)}
    for module, body in _parsed(family):
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= dict.fromkeys(ast.literal_eval(node.value), module)
    return dict(sorted(found.items()))


@cache
def _parsed(family: str) -> list[tuple[str, list[ast.stmt]]]:
    """Name and statements of the modules that have something to show."""
    found = []
    for path in sorted(SOURCES.joinpath(*FAMILIES[family].split(".")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.stem != "__init__" and any(mark in source for mark in _MARKS):
            module = f"decodery.{FAMILIES[family]}.{path.stem}"
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
                said = facts(
                    name, doc=ast.get_docstring(node), tables=tables, lacking=lacks_setting(node, module), **given
                )
                yield Description(family=family, **said), node.name


def main() -> int:
    stale = {
        path: text
        for path, text in ({INDEX: index()} | stubs()).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if "--check" in sys.argv:
            print(f"{path} is out of date: run python tools/method_index.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

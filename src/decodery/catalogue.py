"""What is in the box, read from the source files: naming the methods must not cost the import of PyTorch."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_MARK = "\n@register("
"""What stands in a file that may define methods; the others are not parsed."""


@dataclass(frozen=True)
class Description:
    """What one method says of itself. paper and year are None where there is no source."""

    name: str
    family: str
    paper: str | None
    year: int | None
    guarantee: str
    lossless: bool
    needs: tuple[str, ...]
    summary: str

    def as_dict(self) -> dict[str, Any]:
        """What `decodery methods --json` prints of it."""
        values = {field.name: getattr(self, field.name) for field in fields(Description)}
        return values | {"needs": list(self.needs)}


def facts(
    name: str, *, paper: str = "", guarantee: str = "", lossless: bool = False, needs: Any = (), doc: str | None = None
) -> dict[str, Any]:
    """The fields of a `Description` but its family, from the arguments of `register` and the class's docstring."""
    year = re.search(r"\((\d{4})\)\s*$", paper)
    return {
        "name": name,
        "paper": paper or None,
        "year": int(year[1]) if year else None,
        "guarantee": guarantee or ("the law of the output is unchanged" if lossless else "changes the output"),
        "lossless": lossless,
        "needs": tuple(needs),
        "summary": inspect.cleandoc(doc or "").partition("\n")[0],
    }


@cache
def catalogue(family: str) -> dict[str, tuple[Description, str]]:
    """By name, sorted: the methods a family's package defines, each with the module that does; no module is imported.

    Raises ValueError where the arguments of a `@register(...)` are no literals.
    """
    folder = _ROOT.joinpath(*family.split("."))
    found = {
        described.name: (described, f"{__package__}.{family}.{path.stem}")
        for path in folder.glob("*.py")
        for described in _of(path, family)
    }
    return dict(sorted(found.items()))


def _of(path: Path, family: str) -> Iterator[Description]:
    source = path.read_text(encoding="utf-8")
    if _MARK not in source:
        return
    for node in ast.parse(source, str(path)).body:
        for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "register":
                assert isinstance(node, ast.ClassDef)
                (name,) = (ast.literal_eval(value) for value in mark.args)
                given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in mark.keywords}
                yield Description(family=family, **facts(name, doc=ast.get_docstring(node), **given))

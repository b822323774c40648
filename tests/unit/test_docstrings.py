"""Docstrings of what is public: a short summary, and parameters in sections, under the names that they have."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import decodery
from decodery.core import registry
from decodery.core.docstrings import ENTRY, field_texts, split

SOURCES = Path(decodery.__file__).parent
PACKAGES = (
    *("step", "sampling", "speculative", "constraints", "kv_cache", "monitors", "scorers", "logits_sources"),
    *("compression", "diffusion", "extras", "search", "models", "core", "engine", "llm", "testing", "integrations"),
    *("training", "server"),
)
"""Packages whose public functions, classes and methods are documented in sections."""
WIDEST = 100
"""Characters of a summary."""

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _public(body: list[ast.stmt], *, private: bool = False) -> Iterator[Node]:
    """The public classes and functions of a body, and those of its classes. private: the others as well."""
    for node in body:
        if isinstance(node, Node) and (private or not node.name.startswith("_") or node.name == "__init__"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, private=private)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    starred = [each for each in (given.vararg, given.kwarg) if each]
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *starred)}


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Fields, properties, parameters of `__init__`, and what it sets."""
    found: set[str] = set()
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            found |= {node.name, *(_parameters(node) if node.name == "__init__" else ())}
            found |= {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            }
    return found


def _faults(node: Node, inherited: set[str]) -> Iterator[str]:
    doc = ast.get_docstring(node)
    if not doc:
        return
    text, sections = split(doc)
    summary, _, rest = doc.partition("\n")
    if len(summary) > WIDEST:
        yield f"the summary has {len(summary)} characters"
    if rest and not rest.startswith("\n"):
        yield "the summary takes more than one line"
    known = _attributes(node) | inherited if isinstance(node, ast.ClassDef) else _parameters(node)
    lists = "\n".join(sections.get(heading, "") for heading in ("Args", "Attributes"))
    named = [name.lstrip("*") for names in ENTRY.findall(lists) for name in names.split(", ")]
    for line in lists.splitlines():
        if line and not line.startswith(" ") and not ENTRY.match(line):
            yield f"{line!r} describes no parameter"
    if len(named) > len(set(named)):
        yield "a parameter is described twice"
    if strange := set(named) - known:
        yield f"there is no {', '.join(sorted(strange))}"
    for match in re.finditer(r"(?:^|[.;] )`?(\w+)`?(?:, `?\w+`?)*: ", " ".join(text.split())):
        if match[1] in known:
            yield f"{match[1]} is described outside of a section"


def _bases(cls: ast.ClassDef, classes: dict[str, list[ast.ClassDef]], above: tuple[str, ...] = ()) -> set[str]:
    """Attributes of all classes that the bases of a class may be, by their names."""
    found: set[str] = set()
    for base in cls.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name not in above:
            for each in classes.get(name, ()):
                found |= _attributes(each) | _bases(each, classes, (*above, name))
    return found


@pytest.fixture(scope="module")
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}


@pytest.fixture(scope="module")
def classes(modules: dict[Path, ast.Module]) -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for module in modules.values():
        for node in _public(module.body, private=True):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@pytest.mark.invariant
@pytest.mark.invariant
@pytest.mark.parametrize("package", PACKAGES)
def test_parameters_are_documented_in_sections(
    package: str, modules: dict[Path, ast.Module], classes: dict[str, list[ast.ClassDef]]
) -> None:
    faults = [
        f"{path.relative_to(SOURCES)}:{node.lineno} {node.name}: {fault}"
        for path, module in modules.items()
        if path.relative_to(SOURCES).parts[0] == package
        if not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(SOURCES).parts)
        for node in _public(module.body)
        for fault in _faults(node, _bases(node, classes) if isinstance(node, ast.ClassDef) else set())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.invariant
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_setting_of_a_method_is_documented(family: str) -> None:
    missing = [
        f"{family} {method.name}: {field.name}"
        for method in registry.methods(family)
        for field in dataclasses.fields(method.cls)
        if field.init and field.name not in field_texts(method.cls)
    ]
    assert not missing, "\n".join(missing)

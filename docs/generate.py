"""Writes the generated parts of the documentation: whatever stands between `<!-- begin X -->` and `<!-- end X -->`.

Writes as well what type checkers read of the packages of methods, whose names are otherwise found when they are used.

`python docs/generate.py` writes them, `--check` only tells whether they are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from decodery import registry
from decodery.catalogue import shown
from decodery.cli.main import COMMANDS, cli
from decodery.registry import Method

sys.path.insert(0, str(Path(__file__).parent))
# Beside this file, wherever it is run from.
import drafting
import sampling
import steering
import timing
from figures import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAMILIES = {
    "draft": ("drafters", "what may come next"),
    "draft.growth": ("growth policies", "how a drafter's guesses become a tree"),
    "verify": ("rules", "which drafts are accepted"),
    "verify.continuous": ("rule of continuous values", "which drafted vectors are accepted"),
    "sample": ("warps", "which distribution is drawn from"),
    "source": ("logit sources", "which models and contexts the logits come from"),
    "budget": ("budget policies", "how much to draft"),
    "constrain": ("constraints", "what may be written"),
    "search": ("searches", "several texts for one answer"),
    "search.scorers": ("scorers", "how good a text is"),
    "suggest": ("way of suggesting", "what a few short continuations may be"),
    "diffuse": ("unmasking policies", "which masked token is settled next"),
    "kv": ("cache policies", "what is remembered"),
    "monitor": ("monitors", "what is watched while decoding"),
    "transform": ("transformations", "how a model is changed"),
    "train": ("trainable parts", "what can be learnt"),
}
"""What the methods of a family are called, and the question they answer."""


def methods() -> str:
    """A table per family."""
    parts = []
    for family in registry.FAMILIES:
        if found := registry.methods(family):
            rows = "\n".join(_row(method) for method in found)
            name, question = FAMILIES[family]
            parts.append(
                f"## {name.capitalize()}: {question}\n\n| name | what it does | settings | guarantee | source |\n"
                f"|---|---|---|---|---|\n{rows}"
            )
    return "\n\n".join(parts)


def _row(method: Method) -> str:
    fields = [field for field in dataclasses.fields(method.cls) if field.init]
    settings = "<br>".join(f"`{_setting(field)}`" for field in fields)
    needs = f"; needs {', '.join(method.needs)}" if method.needs else ""
    source = method.paper or ""
    cells = [f"`{method.name}`", method.summary, settings, method.guarantee + needs, source]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _setting(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}={field.default_factory()}"
    return f"{field.name}=..."


def method_count() -> str:
    """How many methods there are, by family."""
    counts = {family: len(registry.methods(family)) for family in registry.FAMILIES}
    return ", ".join(f"{count} {FAMILIES[family][0]}" for family, count in counts.items() if count) + "."


def commands() -> str:
    """The help of every command, as it is printed at a width of 100."""
    parts = []
    top = click.Context(cli, info_name="decodery", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        context = click.Context(command, parent=top, info_name=name, max_content_width=100, terminal_width=100)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def successor() -> str:
    """The worked example, as it is run by the tests."""
    return f"```python\n{(ROOT / 'examples' / 'successor.py').read_text(encoding='utf-8').strip()}\n```"


OWN = ("Calm", "TwoMemories", "_Mean", "AtMost", "Counting", "Varied", "Small", "ShortSighted", "SecondThought")


def own(name: str) -> str:
    """A class of the example of methods of one's own, which the tests run."""
    source = (ROOT / "examples" / "own_methods.py").read_text(encoding="utf-8")
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    first = min(node.lineno for node in (found, *found.decorator_list))
    return "```python\n" + "\n".join(source.splitlines()[first - 1 : found.end_lineno]) + "\n```"


SECTIONS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "method-count": method_count,
    "commands": commands,
    "successor": successor,
    **{f"own-{name}": partial(own, name) for name in OWN},
    **timing.SECTIONS,
    **drafting.SECTIONS,
    **steering.SECTIONS,
    **sampling.SECTIONS,
}


def fill(text: str) -> str:
    """A page with all its generated parts made anew."""

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n\n{SECTIONS[name]()}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", section, text, flags=re.DOTALL)


def stubs() -> dict[Path, str]:
    """The stub of every package of methods: its names and where they come from."""
    packages = [family for family in registry.FAMILIES if shown(family)]
    return {
        ROOT / "src" / "decodery" / family.replace(".", "/") / "__init__.pyi": _stub(family, packages)
        for family in packages
    }


def _stub(family: str, packages: list[str]) -> str:
    inner = [name for parent, _, name in (package.rpartition(".") for package in packages) if parent == family]
    lines = ["# Written by docs/generate.py.", *(f"from . import {name} as {name}" for name in inner)]
    lines += [f"from .{home.rpartition('.')[2]} import {name} as {name}" for name, home in shown(family).items()]
    return "\n".join(lines) + "\n"


def stale() -> dict[Path, str]:
    """What is out of date: the pages by their generated parts, and the stubs; each as it should be."""
    pages = {page: fill(page.read_text(encoding="utf-8")) for page in PAGES}
    return {
        path: text
        for path, text in (pages | stubs()).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    found = stale()
    for path, text in found.items():
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if found and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the generated parts of the documentation, between `<!-- begin X -->` and `<!-- end X -->`.

It writes the plots of results, too.

`python tools/docs/generate.py` writes them; `--check` only checks whether they are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click

from decodery.cli.main import COMMANDS, cli
from decodery.core import registry
from decodery.core.registry import Method
from decodery.llm.readiness import readiness
from decodery.testing import tiny_transformer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]
# Beside this file, wherever it is run from.
import advising  # noqa: E402
import alike  # noqa: E402
import api_reference  # noqa: E402
import building  # noqa: E402
import changing  # noqa: E402
import comparing  # noqa: E402
import drafter_table  # noqa: E402
import drafting  # noqa: E402
import filling  # noqa: E402
import gpus  # noqa: E402
import heading  # noqa: E402
import hearing  # noqa: E402
import limits  # noqa: E402
import loads  # noqa: E402
import ordering  # noqa: E402
import plots  # noqa: E402
import remembering  # noqa: E402
import sampling  # noqa: E402
import searching  # noqa: E402
import seeking  # noqa: E402
import sizing  # noqa: E402
import steering  # noqa: E402
import systems  # noqa: E402
import teaching  # noqa: E402
import timing  # noqa: E402
import watching  # noqa: E402
from figures import ROOT  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FAMILIES = {
    "drafter": ("drafters", "propose the next tokens"),
    "tree-policy": ("tree policies", "shape a draft tree"),
    "acceptance-rule": ("acceptance rules", "decide which drafts become text"),
    "continuous-acceptance": ("acceptance rules for continuous values", "decide which drafted vectors are kept"),
    "logits-processor": ("logits processors", "change the distribution that is sampled"),
    "logits-source": ("logits sources", "compute logits from several models, contexts or layers"),
    "draft-length": ("draft length policies", "limit how much a step drafts"),
    "constraint": ("constraints", "restrict what may be written"),
    "search": ("searches", "follow several continuations of a prompt"),
    "scorer": ("scorers", "rate texts"),
    "suggestion": ("suggestion methods", "give several short continuations"),
    "simultaneous": ("simultaneous policies", "write while the source arrives"),
    "diffusion": ("unmasking policies", "fill the positions of a diffusion canvas"),
    "diffusion-cache": ("diffusion caches", "reuse rows of a canvas"),
    "expert-sharing": ("expert sharing methods", "choose experts for all rows of a canvas"),
    "cache-policy": ("KV cache policies", "decide which keys and values are kept and read"),
    "monitor": ("monitors", "watch a text while it is written"),
    "compression": ("model compression methods", "make a smaller copy of a model"),
    "training": ("trained parts", "are made by `decodery train`"),
}
"""What the methods of a family are called, and what they do."""


def methods() -> str:
    """A table per family."""
    parts = []
    for family in registry.FAMILIES:
        if found := registry.methods(family):
            # A column that is empty in a whole family is left out.
            tables = ["requirements"] if any(method.requirements for method in found) else []
            name, task = FAMILIES[family]
            columns = ["name", "what it does", "settings", *tables, "guarantee", "source"]
            head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
            title = name[0].upper() + name[1:]
            parts.append(f"## {title}\n\n{title} {task}.")
            for group_title, group in _by_readiness(family, found):
                rows = "\n".join(_row(method, tables) for method in group)
                parts.append(f"{group_title}{head}\n{rows}")
    return "\n\n".join(parts)


def _by_readiness(family: str, found: list[Method]) -> list[tuple[str, list[Method]]]:
    """Methods that are ready on any model, and those that need something; one group if all are ready."""
    missing = readiness(found, tiny_transformer(0))
    if not any(missing.values()):
        return [("", found)]
    ready = [method for method in found if not missing[family, method.name]]
    groups = {
        "Ready on any model": [method for method in ready if not method.slower],
        "Ready on any model, but slower than plain decoding on CPUs": [method for method in ready if method.slower],
        "Needs a trained part, a second model or a setting": [
            method for method in found if missing[family, method.name]
        ],
    }
    return [(f"### {title}\n\n", group) for title, group in groups.items() if group]


def _row(method: Method, tables: list[str]) -> str:
    fields = [field for field in dataclasses.fields(method.cls) if field.init]
    settings = "<br>".join(f"`{setting(field)}`" for field in fields)
    required = [", ".join(getattr(method, table)) for table in tables]
    cells = [f"`{method.name}`", method.summary, settings, *required, method.guarantee, method.paper or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def setting(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        # Line breaks as in code.
        return f"{field.name}={field.default}".replace("\n", "\\n")
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}={field.default_factory()}"
    return f"{field.name}=..."


def method_count() -> str:
    """How many methods there are, by family."""
    counts = {family: len(registry.methods(family)) for family in registry.FAMILIES}
    names = {
        family: name if counts.get(family) != 1 else re.sub("(rule|method)s", r"\1", name)
        for family, (name, _) in FAMILIES.items()
    }
    return ", ".join(f"{count} {names[family]}" for family, count in counts.items() if count) + "."


def commands() -> str:
    """The help of every command, as it is printed at a width of 100; options that an earlier one has stand there."""
    parts, shown = [], dict[str, str]()
    top = click.Context(cli, info_name="decodery", **cli.context_settings)
    for name, command, above in _commands(top):
        context = click.Context(
            command, parent=above, info_name=name.split()[-1], max_content_width=100, terminal_width=100
        )
        shown_here, known = [], dict[str, list[str]]()
        for group in command.get_help(context).split("\n\n"):
            if (earlier := shown.setdefault(group, name)) == name or group.count("\n") < 3:
                shown_here.append(group)
            else:
                known.setdefault(earlier, []).append(group.partition(":")[0])
        again = "".join(
            f"\n\nAs for [{earlier}](#{earlier.replace(' ', '-')}): the options under {', '.join(groups)}."
            for earlier, groups in known.items()
        )
        parts.append(f"## {name}\n\n```text\n" + "\n\n".join(shown_here) + f"\n```{again}")
    return "\n\n".join(parts)


def _commands(top: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its context, and those of the groups but `train`, which has too many."""
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        yield name, command, top
        if isinstance(command, click.Group) and name != "train":
            above = click.Context(command, parent=top, info_name=name)
            for inner in command.list_commands(above):
                found = command.get_command(above, inner)
                assert found is not None
                yield f"{name} {inner}", found, above


def successor() -> str:
    """The worked example, as the tests run it."""
    return f"```python\n{(ROOT / 'examples' / 'successor.py').read_text(encoding='utf-8').strip()}\n```"


OWN = (
    *("Calm", "TwoMemories", "_Mean", "AtMost", "Counting", "Varied", "Doubtful", "ShortSighted", "SecondThought"),
    *("TwoFirsts", "Halving", "FirstTokens", "Recent", "_Recent", "Repeats", "SurerHalf"),
)


def own(name: str) -> str:
    """A class of the example of own methods, which the tests run."""
    source = (ROOT / "examples" / "own_methods.py").read_text(encoding="utf-8")
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    first = min(node.lineno for node in (found, *found.decorator_list))
    return "```python\n" + "\n".join(source.splitlines()[first - 1 : found.end_lineno]) + "\n```"


MADE: dict[str, Callable[[], str]] = {
    **alike.SECTIONS,
    **timing.SECTIONS,
    **advising.SECTIONS,
    **drafting.SECTIONS,
    **heading.SECTIONS,
    **ordering.SECTIONS,
    **remembering.SECTIONS,
    **watching.SECTIONS,
    **steering.SECTIONS,
    **sampling.SECTIONS,
    **searching.SECTIONS,
    **seeking.SECTIONS,
    **comparing.SECTIONS,
    **filling.SECTIONS,
    **gpus.SECTIONS,
    **limits.SECTIONS,
    **hearing.SECTIONS,
    **loads.SECTIONS,
    **building.SECTIONS,
    **teaching.SECTIONS,
    **changing.SECTIONS,
    **sizing.SECTIONS,
}
"""What was measured; whole on the pages of results."""

SECTIONS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "method-count": method_count,
    "commands": commands,
    "successor": successor,
    **api_reference.SECTIONS,
    **drafter_table.SECTIONS,
    **systems.SECTIONS,
    **{f"own-{name}": partial(own, name) for name in OWN},
    **MADE,
}


def fill(text: str) -> str:
    """A page with all its generated parts made anew."""

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n\n{SECTIONS[name]()}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", section, text, flags=re.DOTALL)


def stale() -> dict[Path, str]:
    """What is out of date: the pages by their generated parts, and the plots; each as it should be."""
    pages = {page: fill(page.read_text(encoding="utf-8")) for page in PAGES}
    drawn = plots.PLOTS | comparing.PLOTS | watching.PLOTS | remembering.PLOTS | changing.PLOTS
    return {
        path: text
        for path, text in (pages | {path: make() for path, make in drawn.items()}).items()
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

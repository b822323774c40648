"""Writes the generated parts of the documentation: whatever stands between `<!-- begin X -->` and `<!-- end X -->`.

`python docs/generate.py` writes them, `--check` only tells whether they are up to date.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decodery import registry
from decodery.bench.result import BENCHMARK, PASSES, Result, read
from decodery.cli.main import COMMANDS, cli
from decodery.registry import Method

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAMILIES = {
    "draft": ("drafters", "what may come next"),
    "draft.growth": ("growth policies", "how a drafter's guesses become a tree"),
    "verify": ("rules", "which drafts are accepted"),
    "sample": ("warps", "which distribution is drawn from"),
    "budget": ("budget policies", "how much to draft"),
    "constrain": ("constraints", "what may be written"),
    "search": ("searches", "several texts for one answer"),
    "search.scorers": ("scorers", "how good a text is"),
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


def speed() -> str:
    """A table per result file of a benchmark."""
    tables = [_benchmark(result) for result in _results(BENCHMARK)]
    return "\n\n".join(tables) or "No results yet: `make bench` writes them."


def passes() -> str:
    """A table per result file of pass costs: milliseconds by precision and number of rows."""
    tables = [_passes(result) for result in _results(PASSES)]
    return "\n\n".join(tables) or "No results yet: `decodery bench --pass` writes them."


def _results(kind: str) -> list[Result]:
    found = [read(path) for path in sorted((ROOT / "benchmarks" / "results").rglob("*.json"))]
    return [result for result in found if result["kind"] == kind]


def _benchmark(result: Result) -> str:
    rows = [row for row in result["rows"] if row["category"] == "all" and row["tokens_per_second"]]
    lines = [_benchmark_row(row) for row in rows]
    settings = result["settings"]
    how = f"{_where(result)}; {settings['rounds']} rounds in turn, {settings['max_new_tokens']} new tokens at most"
    head = "| workload | method | tokens/s | times plain (95%) | tokens per pass | texts as plain decoding |"
    return f"{how}.\n\n{head}\n|---|---|---:|---:|---:|---:|\n" + "\n".join(lines)


def _benchmark_row(row: dict[str, Any]) -> str:
    interval = f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})" if row["speedup_low"] is not None else ""
    cells = [
        f"{row['workload']}, {row['prompts']} prompts",
        f"`{row['method']}`" + (f" ({row['dtype']})" if row["dtype"] else ""),
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f}{interval}" if row["speedup"] is not None else "",
        f"{row['tokens_per_pass']:.2f}" if row["tokens_per_pass"] is not None else "",
        f"{row['lossless']['identical']} of {row['lossless']['checked']}" if row["lossless"]["checked"] else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _passes(result: Result) -> str:
    counts = sorted({row["rows"] for row in result["rows"]})
    table: dict[str, dict[int, float]] = {}
    for row in result["rows"]:
        table.setdefault(row["precision"], {})[row["rows"]] = row["ms"]
    head = "| rows | " + " | ".join(str(count) for count in counts) + " |\n|---|" + "---:|" * len(counts)
    lines = [
        f"| {precision} | " + " | ".join(f"{times[count]:.1f}" if count in times else "" for count in counts) + " |"
        for precision, times in table.items()
    ]
    return f"{_where(result)}; milliseconds per pass.\n\n{head}\n" + "\n".join(lines)


def _where(result: Result) -> str:
    machine = result["machine"]
    devices = machine["gpus"] or [f"{machine['processor']}, {machine['threads']} threads"]
    return f"{result['model']['name']} on {', '.join(devices)} ({result['created'][:10]})"


SECTIONS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "method-count": method_count,
    "commands": commands,
    "successor": successor,
    "speed": speed,
    "passes": passes,
}


def fill(text: str) -> str:
    """A page with all its generated parts made anew."""

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n\n{SECTIONS[name]()}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", section, text, flags=re.DOTALL)


def stale() -> list[Path]:
    """The pages whose generated parts are out of date."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    return [page for page, text in texts.items() if fill(text) != text]


def main() -> int:
    pages = stale()
    for page in pages:
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if pages and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

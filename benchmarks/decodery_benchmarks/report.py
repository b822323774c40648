"""A result as a person reads it: a page and tables, of all kinds of benchmarks."""

from __future__ import annotations

from pathlib import Path

from decodery.bench import report
from decodery.bench.report import markdown
from decodery.bench.result import Result, dump, write

from .diffusion import figures as diffusion
from .kinds import CANVASES, CONTEXTS, MONITORS, SEARCH
from .long_context import figures as long_context
from .monitors import figures as monitors
from .searches import figures as searches

_SCRIPTS = {SEARCH: ("searches", "search.js"), MONITORS: ("monitors", "monitors.js")}
"""By kind: what its page is called, and the script that draws it."""


def page(result: Result) -> str:
    """One HTML file that needs nothing else."""
    if result["kind"] == CANVASES:
        return diffusion.page(result)
    if result["kind"] == CONTEXTS:
        return long_context.page(result)
    if result["kind"] in _SCRIPTS:
        what, script = _SCRIPTS[result["kind"]]
        return report.page(result, [(Path(__file__).parent / "page" / script).read_text(encoding="utf-8")], what)
    return report.page(result)


def save(result: Result, out: Path | None) -> None:
    """Write the result and its page to the folder `out`, if there is one."""
    if out is not None:
        write(out / "results.json", dump(result))
        write(out / "report.html", page(result))


def table(result: Result) -> str:
    """The figures as Markdown."""
    if result["kind"] == CANVASES:
        return diffusion.table(result)
    if result["kind"] == CONTEXTS:
        return long_context.table(result)
    if result["kind"] == SEARCH:
        shown = [searches.shown(row) for row in result["rows"]]
        return f"{searches.title(result)}:\n\n{markdown(searches.HEAD, shown)}"
    if result["kind"] == MONITORS:
        return _monitors_table(result)
    return report.table(result)


def _monitors_table(result: Result) -> str:
    """Detection in one table, what acting did in one per testbed, and what is to be known of both."""
    rows = [monitors.shown(row) for row in result["rows"]]
    parts = [f"{monitors.title(result)}:\n\n{markdown(monitors.HEAD, rows)}"]
    parts += [
        markdown(list(acts[0]), [monitors.act_cells(act) for act in acts]) for acts in monitors.acts_of(result).values()
    ]
    return "\n\n".join([*parts, *result["notes"]])

"""`decodery bench --workload search`: what searches find on puzzles, and what they spend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .bench_workload import settled, shown

if TYPE_CHECKING:
    from decodery.bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure searches on puzzles, and show what came of it. given: other options."""
    from decodery.bench.result import SEARCH
    from decodery.bench.searches.job import SearchJob
    from decodery.bench.searches.settings import SearchSettings
    from decodery.puzzles import SPLITS

    if "splits" in given:
        *others, split = given["splits"] or ("",)
        if others or split not in SPLITS:
            asked = ",".join(given["splits"])
            raise click.UsageError(f"--workload search takes puzzles of one split: {', '.join(SPLITS)}, not {asked!r}")
        given = {name: value for name, value in given.items() if name != "splits"} | {"split": split}
    settings, _ = settled("search", SEARCH, SearchSettings, given, out, resume)
    settings.check()
    return shown(settings, lambda lm, *watched: SearchJob(lm, settings, out, resume).run(*watched), as_json=as_json)

"""`decodery bench --workload search`: what searches find on puzzles, and what they spend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .bench_alone import settled
from .decoding import stop_on_interrupt

if TYPE_CHECKING:
    from ..bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure searches on puzzles, and show what came of it. given: other options."""
    from .. import load
    from ..bench.report import table
    from ..bench.result import SEARCH, summary
    from ..bench.searches.job import SearchJob
    from ..bench.searches.settings import SearchSettings
    from ..bench.terminal import progress_bar

    settings, _ = settled("search", SEARCH, SearchSettings, given, out, resume)
    settings.check()
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = SearchJob(lm, settings, out, resume).run(report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

"""`decodery bench --workload monitors`: what monitors tell, and what acting on them does."""

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
    """Measure monitors on their testbeds, and show what came of it. given: other options."""
    from .. import load
    from ..bench.report import table
    from ..bench.result import MONITORS, summary
    from ..bench.terminal import progress_bar
    from ..bench.watching.job import WatchJob
    from ..bench.watching.settings import WatchSettings

    settings, earlier = settled("monitors", MONITORS, WatchSettings, given, out, resume)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = WatchJob(lm, settings, out, earlier).run(report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

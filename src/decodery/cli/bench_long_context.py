"""`decodery bench --workload long-context`: what cache policies lose, hold and read."""

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
    """Measure cache policies by budget, and show what came of it. given: other options."""
    from .. import load
    from ..bench.contexts.job import ContextJob
    from ..bench.contexts.settings import ContextSettings
    from ..bench.report import table
    from ..bench.result import CONTEXTS, summary
    from ..bench.terminal import progress_bar

    settings, earlier = settled("long-context", CONTEXTS, ContextSettings, given, out, resume)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = ContextJob(lm, settings, out, earlier).run(report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

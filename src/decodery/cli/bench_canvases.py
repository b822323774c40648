"""`decodery bench --workload parallelbench`: ways of filling canvases, and what a pass may write without loss."""

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
    """Measure ways of filling canvases, and show what came of it. given: other options."""
    from .. import load
    from ..bench.canvases.job import CanvasSettings
    from ..bench.canvases.job import measure as fill
    from ..bench.report import table
    from ..bench.result import CANVASES, summary
    from ..bench.terminal import progress_bar

    if "model" not in given and not resume:
        raise click.UsageError("--workload parallelbench needs --model, a masked diffusion model")
    settings, earlier = settled("parallelbench", CANVASES, CanvasSettings, given, out, resume)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = fill(lm, settings, out, report, stopped, earlier)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

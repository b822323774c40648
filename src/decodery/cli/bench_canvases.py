"""`decodery bench --workload parallelbench`: ways of filling canvases, and what a pass may write without loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .decoding import stop_on_interrupt

if TYPE_CHECKING:
    from ..bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool) -> Result:
    """Measure ways of filling canvases, and show what came of it. given: other options."""
    from .. import load
    from ..bench.canvases.job import CanvasSettings
    from ..bench.canvases.job import measure as fill
    from ..bench.report import table
    from ..bench.result import summary
    from ..bench.terminal import progress_bar

    if given.pop("workloads") != ("parallelbench",):
        raise click.UsageError("--workload parallelbench stands alone")
    known = {field.name for field in dataclasses.fields(CanvasSettings)}
    if strange := sorted(set(given) - known):
        raise click.UsageError(f"--workload parallelbench has no use for --{strange[0].replace('_', '-')}")
    if "model" not in given:
        raise click.UsageError("--workload parallelbench needs --model, a masked diffusion model")
    settings = CanvasSettings(**given)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = fill(lm, settings, out, report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

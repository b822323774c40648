"""`decodery bench --workload parallelbench`: ways of filling canvases, and what a pass may write without loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .bench_workload import settled, shown

if TYPE_CHECKING:
    from decodery.bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure ways of filling canvases, and show what came of it. given: other options."""
    from decodery.bench.canvases.job import measure as fill
    from decodery.bench.canvases.settings import CanvasSettings
    from decodery.bench.result import CANVASES

    if "model" not in given and not resume:
        raise click.UsageError("--workload parallelbench needs --model, a masked diffusion model")
    settings, earlier = settled("parallelbench", CANVASES, CanvasSettings, given, out, resume)
    return shown(
        settings, lambda lm, report, stopped: fill(lm, settings, out, report, stopped, earlier), as_json=as_json
    )

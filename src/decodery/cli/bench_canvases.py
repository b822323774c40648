"""`decodery bench --workload parallelbench`: ways of filling canvases, and what a pass may write without loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SettingsError
from .decoding import stop_on_interrupt

if TYPE_CHECKING:
    from ..bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure ways of filling canvases, and show what came of it. given: other options."""
    from .. import load
    from ..bench.canvases.job import CanvasSettings
    from ..bench.canvases.job import measure as fill
    from ..bench.report import table
    from ..bench.result import read, require_canvases, summary
    from ..bench.terminal import progress_bar

    if given.pop("workloads") != ("parallelbench",):
        raise click.UsageError("--workload parallelbench stands alone")
    known = {field.name for field in dataclasses.fields(CanvasSettings)}
    if strange := sorted(set(given) - known):
        raise click.UsageError(f"--workload parallelbench has no use for --{strange[0].replace('_', '-')}")
    earlier = None
    if resume:
        if out is None:
            raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark")
        earlier = require_canvases(read(out))
        settings = CanvasSettings.from_dict(earlier["settings"])
        if dataclasses.replace(settings, **given) != settings:
            raise SettingsError(f"the benchmark in {out} has other settings: give none with --resume, or no --resume")
        if earlier["complete"]:
            raise SettingsError(f"the benchmark in {out} is complete: choose another --out to repeat it")
    elif "model" not in given:
        raise click.UsageError("--workload parallelbench needs --model, a masked diffusion model")
    else:
        settings = CanvasSettings(**given)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = fill(lm, settings, out, report, stopped, earlier)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

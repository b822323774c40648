"""`decodery bench --workload monitors`: what monitors tell, and what acting on them does."""

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
    """Measure monitors on their testbeds, and show what came of it. given: other options."""
    from .. import load
    from ..bench.report import table
    from ..bench.result import read, require_monitors, summary
    from ..bench.terminal import progress_bar
    from ..bench.watching.job import WatchJob
    from ..bench.watching.settings import WatchSettings

    if given.pop("workloads") != ("monitors",):
        raise click.UsageError("--workload monitors stands alone")
    # The folder of public sets may come from the environment, and is of no use here.
    given.pop("data", None)
    known = {field.name for field in dataclasses.fields(WatchSettings)} - {"rate"}
    if strange := sorted(set(given) - known):
        raise click.UsageError(f"--workload monitors has no use for --{strange[0].replace('_', '-')}")
    earlier = None
    if resume:
        if out is None:
            raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark")
        earlier = require_monitors(read(out))
        settings = WatchSettings.from_dict(earlier["settings"])
        if dataclasses.replace(settings, **given) != settings:
            raise SettingsError(f"the benchmark in {out} has other settings: give none with --resume, or no --resume")
        if earlier["complete"]:
            raise SettingsError(f"the benchmark in {out} is complete: choose another --out to repeat it")
    else:
        settings = WatchSettings(**given)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = WatchJob(lm, settings, out, earlier).run(report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

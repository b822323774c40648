"""`decodery bench --workload search`: what searches find on puzzles, and what they spend."""

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
    """Measure searches on puzzles, and show what came of it. given: other options."""
    from .. import load
    from ..bench.report import table
    from ..bench.result import read, require_search, summary
    from ..bench.searches.job import SearchJob
    from ..bench.searches.settings import SearchSettings
    from ..bench.terminal import progress_bar

    if given.pop("workloads") != ("search",):
        raise click.UsageError("--workload search stands alone")
    # The folder of public sets may come from the environment, and is of no use here.
    given.pop("data", None)
    known = {field.name for field in dataclasses.fields(SearchSettings)}
    if strange := sorted(set(given) - known):
        raise click.UsageError(f"--workload search has no use for --{strange[0].replace('_', '-')}")
    if resume:
        if out is None:
            raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark")
        earlier = require_search(read(out))
        settings = SearchSettings.from_dict(earlier["settings"])
        if settings.imports and "imports" not in given:
            again = " ".join(f"--import {name}" for name in settings.imports)
            raise SettingsError(
                f"the benchmark in {out} has methods of other modules: add {again}, which runs their code"
            )
        if dataclasses.replace(settings, **given) != settings:
            raise SettingsError(f"the benchmark in {out} has other settings: give none with --resume, or no --resume")
        if earlier["complete"]:
            raise SettingsError(f"the benchmark in {out} is complete: choose another --out to repeat it")
    else:
        settings = SearchSettings(**given)
    settings.check()
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = SearchJob(lm, settings, out, resume).run(report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

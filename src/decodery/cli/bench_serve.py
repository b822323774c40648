"""`decodery bench --serve`: what a server stands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .decode import stop_on_interrupt

if TYPE_CHECKING:
    from decodery.bench.result import Result

_NOT_OF_LOAD = ("methods", "splits", "input_tokens", "max_draft_tokens", "rounds")


def measure(url: str, given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure the server at `url`, or one that is started for it, and show what came of it. given: other options."""
    try:
        from decodery.bench.load.job import LoadJob
        from decodery.bench.load.show import show
        from decodery.bench.load.target import Target, own
    except ImportError as error:
        raise SettingsError("--serve needs more packages: pip install 'decodery[serve]'") from error
    from decodery.bench.load.settings import LoadSettings
    from decodery.bench.result import read, require_load, summary
    from decodery.bench.terminal import progress_bar, screen

    if strange := [name for name in _NOT_OF_LOAD if name in given]:
        raise click.UsageError(f"--serve does not take --{strange[0].removesuffix('s').replace('_', '-')}")
    model = {"name": "smollm2", "dtype": "auto"} if not url else {"name": url}
    for option, name in (("model", "name"), ("dtype", "dtype")):
        if option in given:
            if url:
                raise click.UsageError(f"--{option} is for the server that is started where --serve has no URL")
            model[name] = given.pop(option)
    if workloads := given.pop("workloads", ()):
        if len(workloads) > 1:
            raise click.UsageError("--serve takes one --workload")
        given["workload"] = workloads[0]
    settings, earlier = LoadSettings(**given), None
    if resume:
        if out is None:
            raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark")
        earlier = require_load(read(out))
        if earlier["complete"]:
            raise SettingsError(f"the benchmark in {out} is complete: choose another --out to repeat it")
        settings = LoadSettings.from_dict(earlier["settings"])
        # The data folder may come from the environment, and that of the file is the one that counts.
        same = dataclasses.replace(settings, **given | {"data": settings.data}) == settings
        if not same or model.keys() != earlier["model"].keys():
            raise SettingsError(
                f"the benchmark in {out} has other settings: give no other options with --resume, or leave out --resume"
            )
        model = earlier["model"]
    target = Target("server", url.rstrip("/").removesuffix("/v1")) if url else own(model["name"], model["dtype"])
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = LoadJob(settings, [target], model, out, earlier).run(report, stopped)
    if as_json:
        click.echo(json.dumps(summary(result), ensure_ascii=False))
    else:
        show(result, screen())
    return result

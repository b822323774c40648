"""What workloads that are measured alone have in common: their options, and the interrupted run they go on from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import click

from decodery.core.errors import SettingsError

from .decode import stop_on_interrupt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from decodery.bench.result import Result
    from decodery.llm.llm import LLM
    from decodery.models.loaders.store import Progress

    class Described(DataclassInstance, Protocol):
        """Settings that a result file can hold."""

        @classmethod
        def from_dict(cls, raw: Any) -> Self: ...


def settled(
    workload: str, kind: str, described: type[Described], given: dict[str, Any], out: Path | None, resume: bool
) -> tuple[Any, Result | None]:
    """The settings of a workload, of what is given or of the interrupted result in `out`, and that result.

    kind: of its result files. Raises UsageError for options that it has no use for, SettingsError for an interrupted
    result of other settings.
    """
    from decodery.bench.result import read, require

    if given.pop("workloads") != (workload,):
        raise click.UsageError(f"--workload {workload} stands alone")
    known = {field.name for field in dataclasses.fields(described)}
    if "data" not in known:
        # The folder of public sets may come from the environment, and is of no use here.
        given.pop("data", None)
    if strange := sorted(set(given) - known):
        raise click.UsageError(f"--workload {workload} has no use for --{strange[0].replace('_', '-')}")
    if not resume:
        return described(**given), None
    if out is None:
        raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark")
    earlier = require(read(out), kind)
    settings = described.from_dict(earlier["settings"])
    imports = getattr(settings, "imports", ())
    if imports and "imports" not in given:
        again = " ".join(f"--import {name}" for name in imports)
        raise SettingsError(f"the benchmark in {out} has methods of other modules: add {again}, which runs their code")
    if dataclasses.replace(settings, **given) != settings:
        raise SettingsError(f"the benchmark in {out} has other settings: give none with --resume, or no --resume")
    if earlier["complete"]:
        raise SettingsError(f"the benchmark in {out} is complete: choose another --out to repeat it")
    return settings, earlier


def shown(settings: Any, measure: Callable[[LLM, Progress, Callable[[], bool]], Result], *, as_json: bool) -> Result:
    """What `measure` finds, printed. measure: of the model the settings name, what shows progress, and what ends it."""
    from decodery import load
    from decodery.bench.report import table
    from decodery.bench.result import summary
    from decodery.bench.terminal import progress_bar

    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = measure(lm, report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    return result

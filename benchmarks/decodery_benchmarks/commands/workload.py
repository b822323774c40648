"""What the benchmarks of `benchmarks/bench.py` share: their options, and the interrupted run that they continue."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import click

from decodery.bench.result import Result, require, summary
from decodery.bench.terminal import progress_bar
from decodery.cli.bench import ended
from decodery.cli.bench_options import Integers, Methods, Names, Numbers
from decodery.cli.command import option
from decodery.cli.decode import stop_on_interrupt
from decodery.cli.options import OUT_FOLDER, together
from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress
from decodery_benchmarks import kinds, solvers
from decodery_benchmarks.report import table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Described(DataclassInstance, Protocol):
        """Settings that a result file can hold."""

        @classmethod
        def from_dict(cls, raw: Any) -> Self: ...


def model_options(default: str) -> Callable[..., Any]:
    """Which model is measured, in which precision."""
    return together(
        option("-m", "--model", metavar="NAME", show_default=default, help="A model, as decodery bench takes it."),
        option("--dtype", show_default="auto", help="Precision of the weights. auto: that of the checkpoint."),
    )


run_options = together(
    option("--out", type=OUT_FOLDER, metavar="DIR", help="Write DIR/results.json and DIR/report.html."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
    option("--resume", is_flag=True, help="Continue the interrupted benchmark in --out."),
)


def given_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the command line has."""
    return {name: value for name, value in options.items() if value is not None}


def settled(
    kind: str, described: type[Described], given: dict[str, Any], out: Path | None, resume: bool
) -> tuple[Any, Result | None]:
    """The settings of what is given or of the interrupted result in `out`, and that result.

    kind: of its result files. Raises SettingsError for an interrupted result of other settings.
    """
    if not resume:
        return described(**given), None
    if out is None:
        raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark")
    earlier = require(kinds.read(out), kind)
    settings = described.from_dict(earlier["settings"])
    imports = getattr(settings, "imports", ())
    if imports and "imports" not in given:
        again = " ".join(f"--import {name}" for name in imports)
        raise SettingsError(f"the benchmark in {out} uses methods of other modules: add {again}, which runs their code")
    if dataclasses.replace(settings, **given) != settings:
        raise SettingsError(
            f"the benchmark in {out} has other settings: give no other options with --resume, or leave out --resume"
        )
    if earlier["complete"]:
        raise SettingsError(f"the benchmark in {out} is complete: choose another --out to repeat it")
    return settings, earlier


def run(
    settings: Any,
    measure: Callable[[LLM, Progress, Callable[[], bool]], Result],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Measure the model that the settings name, print what was found, and exit as an interrupted command does.

    measure: takes the model, what shows progress, and what says whether to stop.
    """
    lm = solvers.load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = measure(lm, report, stopped)
    click.echo(json.dumps(summary(result), ensure_ascii=False) if as_json else table(result))
    ended(result, out, shlex.join(["python", *sys.argv[:2]]))


__all__ = [
    "Integers",
    "Methods",
    "Names",
    "Numbers",
    "given_of",
    "model_options",
    "option",
    "run",
    "run_options",
    "settled",
]

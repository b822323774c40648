"""`benchmarks/bench.py parallelbench`: diffusion decoders, and what a pass may write without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from decodery.cli.command import command
from decodery_benchmarks.diffusion.job import measure
from decodery_benchmarks.diffusion.settings import CanvasSettings
from decodery_benchmarks.kinds import CANVASES

from .workload import Methods, Names, given_of, model_options, option, run, run_options, settled


@command(example="")
@model_options("required")
@option("--methods", type=Methods(), show_default="all", help="Decoders, such as static,threshold:tau=0.9.")
@option(
    "--tasks",
    type=Names(),
    show_default="the ten on lists",
    help="Tasks: copy, shuffle, ..., sudoku; or published files, such as puzzle/sudoku_n4_12.",
)
@option(
    "--letters",
    type=int,
    show_default="6",
    help="Letters of the longest list, for models of decodery train diffusion.",
)
@option("--prompts", type=int, show_default="50", help="Prompts of each task.")
@option("--max-new-tokens", type=int, show_default="what the tasks need", help="Tokens of a canvas.")
@option("--temperature", type=float, show_default="0", help="Sampling temperature.")
@option("--seed", type=int, show_default="0", help="Seed of the prompts and the texts.")
@option("--data", metavar="DIR", envvar="DECODERY_DATA", help="Folder with the lists of names, for other models.")
@option("--judge", metavar="NAME", help="A chat model that scores sentences of published files.")
@run_options
def parallelbench(out: Path | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Measure diffusion decoders on ParallelBench's tasks.

    Example: python benchmarks/bench.py parallelbench -m FOLDER --methods static,threshold:tau=0.9 --out DIR
    """
    given = given_of(options)
    if "model" not in given and not resume:
        raise click.UsageError("parallelbench needs --model, a masked diffusion model")
    settings, earlier = settled(CANVASES, CanvasSettings, given, out, resume)
    run(
        settings,
        lambda lm, report, stopped: measure(lm, settings, out, report, stopped, earlier),
        out,
        as_json=as_json,
    )

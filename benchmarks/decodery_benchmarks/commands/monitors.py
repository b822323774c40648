"""`benchmarks/bench.py monitors`: what monitors detect, and what acting on them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodery.cli.command import command
from decodery_benchmarks.kinds import MONITORS
from decodery_benchmarks.monitors.job import WatchJob
from decodery_benchmarks.monitors.settings import TESTBEDS, WatchSettings

from .workload import Names, given_of, model_options, option, run, run_options, settled


@command(example="")
@model_options("smollm2")
@option("--methods", type=Names(), show_default="all", help=f"Testbeds: {', '.join(TESTBEDS)}.")
@option("--prompts", type=int, show_default="960", help="Number of questions.")
@option("--rounds", type=int, show_default="5", help="Seeds of split and training.")
@option("--seed", type=int, show_default="0", help="Seed of the questions.")
@run_options
def monitors(out: Path | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Measure monitors on their testbeds.

    Example: python benchmarks/bench.py monitors --methods answers,heads --prompts 480 --rounds 3 --out DIR
    """
    settings, earlier = settled(MONITORS, WatchSettings, given_of(options), out, resume)
    run(settings, lambda lm, *watched: WatchJob(lm, settings, out, earlier).run(*watched), out, as_json=as_json)

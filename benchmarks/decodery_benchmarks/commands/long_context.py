"""`benchmarks/bench.py long-context`: what KV cache policies lose, hold and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodery.cli.command import command
from decodery_benchmarks.kinds import CONTEXTS
from decodery_benchmarks.long_context.job import ContextJob
from decodery_benchmarks.long_context.settings import ContextSettings

from .workload import Integers, Methods, Numbers, given_of, model_options, option, run, run_options, settled


@command(example="")
@model_options("smollm2")
@option(
    "--methods",
    type=Methods(),
    show_default="all",
    help="KV cache policies, such as uniform,oracle,h2o,snapkv:budget={},window=8.",
)
@option("--shares", type=Numbers(), show_default="0.1,0.25,0.5,1", help="Budgets of the policies, as shares of a text.")
@option("--prompts", type=int, show_default="10", help="Lines of a list that are asked for.")
@option("--input-tokens", type=Integers(), show_default="300", help="Lengths of the texts.")
@option("--seed", type=int, show_default="7", help="Seed of the texts.")
@run_options
def long_context(out: Path | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Measure KV cache policies by budget.

    Example: python benchmarks/bench.py long-context --methods "uniform,oracle,h2o" --shares 0.1,0.25 --out DIR
    """
    settings, earlier = settled(CONTEXTS, ContextSettings, given_of(options), out, resume)
    run(settings, lambda lm, *watched: ContextJob(lm, settings, out, earlier).run(*watched), out, as_json=as_json)

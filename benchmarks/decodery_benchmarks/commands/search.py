"""`benchmarks/bench.py search`: what searches find on puzzles, and what they spend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from decodery.cli.command import command
from decodery.cli.options import recorded_import_option
from decodery_benchmarks.kinds import SEARCH
from decodery_benchmarks.puzzles import SPLITS
from decodery_benchmarks.searches.job import SearchJob
from decodery_benchmarks.searches.settings import SearchSettings

from .workload import Integers, Methods, given_of, model_options, option, run, run_options, settled


@command(example="")
@model_options("tiny-1M-chain")
@option(
    "--methods",
    type=Methods(),
    show_default="those of one pool",
    help="pass@n, best-of-n, self-consistency, weighted-vote, first-finish, bag-of-tricks, or a search with {n} and "
    "{scorer} in it.",
)
@option(
    "--puzzle",
    metavar="SPEC",
    show_default="chain",
    help="Puzzle: chain, retry-chain, direct-chain, countdown, dyck, robot, prog or kvhop, such as "
    "chain:operations=12.",
)
@option(
    "--rewards",
    type=Methods(),
    help="Reward models: oracle, outcome, clean, noisy, overconfident-early, hackable, constant, or scorers such as "
    "process-reward:head=FILE.",
)
@option(
    "--budgets",
    type=Integers(),
    show_default="1,2,4,8,16",
    help="Samples of a method; {n} in a search stands for them.",
)
@option("--pool", type=int, show_default="32", help="Samples of a puzzle.")
@option("--prompts", type=int, show_default="100", help="Number of puzzles.")
@option("--split", type=click.Choice(list(SPLITS)), show_default="test", help="The puzzles to use.")
@option("--temperature", type=float, show_default="1", help="Sampling temperature.")
@option("--seed", type=int, show_default="0", help="Seed of the puzzles and the texts.")
@recorded_import_option
@run_options
def search(out: Path | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Measure searches on puzzles, with reward models of known quality.

    Example: python benchmarks/bench.py search --puzzle chain:operations=8 --rewards clean,hackable --out DIR
    """
    settings, _ = settled(SEARCH, SearchSettings, given_of(options), out, resume)
    settings.check()
    run(settings, lambda lm, *watched: SearchJob(lm, settings, out, resume).run(*watched), out, as_json=as_json)

"""`decodery train puzzle-model` and `prm`: what searches are measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .training import command_line, model_option, out_option, resumable, seed_option


@click.command("puzzle-model", short_help="Train a small model that solves puzzles, sometimes.")
@click.argument("puzzle")
@out_option
@click.option("--shape", default="tiny-1M", show_default=True, help="tiny-1M, tiny-3M or tiny-10M.")
@click.option("--steps", default=3000, show_default=True, help="Training steps at most.")
@click.option("--batch", default=48, show_default=True, help="Texts in a step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@click.option("--every", default=10, show_default=True, help="Steps between validations, at which it may stop.")
@seed_option("weights and puzzles")
def puzzle_model(puzzle: str, out: Path, shape: str, steps: int, batch: int, lr: float, every: int, seed: int) -> None:
    """Train a small model for PUZZLE, such as chain:operations=8 or countdown, for decodery bench --workload search.

    It stops on purpose as soon as greedy decoding solves between 25 and 55 % of held-out puzzles and one of 64 samples
    more than 80 %: outside of that no search can be told from another. Stop with Ctrl-C whenever you like: the same
    command goes on where it stopped.
    """
    from ..puzzles import puzzle as named
    from ..train.puzzle_model import PuzzleRecipe, check_folder, train_puzzle_model

    asked, recipe = named(puzzle), PuzzleRecipe(shape=shape, steps=steps, batch=batch, lr=lr, every=every, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        found = train_puzzle_model(asked, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(f"on puzzles held out: greedy {found['greedy']:.1%}, one of 64 samples {found['pass@64']:.1%}")


@click.command(short_help="Train a process reward model for --search best-of-n and others.")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles, and whose states are read")
@click.option("--problems", default=200, show_default=True, help="Puzzles that are solved and labelled.")
@click.option("--solutions", default=4, show_default=True, help="Solutions of each.")
@click.option(
    "--labels",
    type=click.Choice(["rollouts", "reference"]),
    default="rollouts",
    show_default=True,
    help="How steps are labelled: by completing them, or by comparison with a solution (SPARE).",
)
@click.option("--rollouts", default=8, show_default=True, help="Completions of each beginning.")
@click.option("--missed", default=0.0, show_default=True, help="Share of steps that the comparison passes over.")
@click.option("--flipped", default=0.0, show_default=True, help="Share of its labels that are wrong.")
@seed_option("solutions, labels and training")
def prm(
    puzzle: str,
    out: Path,
    model: str,
    problems: int,
    solutions: int,
    labels: Any,
    rollouts: int,
    missed: float,
    flipped: float,
    seed: int,
) -> None:
    """Train a head that tells how likely a solution of PUZZLE is to end rightly, step by step.

    MODEL, such as one of decodery train puzzle-model, first samples solutions, whose steps are labelled by an exact
    verifier; the head then learns to read the labels off its hidden states. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors. Stop with Ctrl-C whenever you like: the same command goes on
    where it stopped.
    """
    from ..model.load import load
    from ..puzzles import puzzle as named
    from ..train.prm import PRM, PRMRecipe, train_prm

    recipe = PRMRecipe(problems, solutions, labels, rollouts, missed, flipped, seed=seed)
    asked, loaded = named(puzzle), load(model)
    with resumable(out) as progress:
        found = train_prm(loaded.model, asked, out, recipe=recipe, command=command_line(), progress=progress)
    facts = found.facts or {}
    click.echo(f"the reward model is ready: process-reward:head={out / PRM}")
    click.echo(
        f"on puzzles held out: AUC {facts['auc']}, cross-entropy {facts['cross_entropy']} against "
        f"{facts['cross_entropy_of_the_mean']} of the mean"
    )

"""`decodery train puzzle-model`: what searches are measured with."""

from __future__ import annotations

from pathlib import Path

import click

from .training import command_line, out_option, resumable, seed_option


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

"""`decodery train merges`: embeddings of merged tokens."""

from __future__ import annotations

from functools import partial

import click

from .command import command, option
from .train_common import Learning, learning, seed_option


@command(example="train merges notes.txt --out merges")
@learning("whose prompts become shorter")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--most", default=0.3, show_default=True, help="Largest share of a prompt's rows that is merged away.")
@seed_option("where it begins, and the order and merges of the texts")
def merges(given: Learning, steps: int, most: float, seed: int) -> None:
    """Train what makes one embedding of several tokens, so that MODEL reads prompts in fewer rows.

    It learns from text FILES to go on after a shorter prompt as after the whole one. MODEL itself stays as it is; it
    is read in floating point. An interrupted run goes on where it stopped.
    """
    from decodery.training.merges import MergeRecipe, check_folder, train_merges

    recipe = MergeRecipe(steps=steps, most=most, seed=seed)
    given.learn(check_folder, partial(train_merges, recipe=recipe))
    click.echo(f"The network is ready: MergeNet.load({str(given.out)!r})")

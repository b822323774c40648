"""`decodery train merges`: embeddings of merged tokens."""

from __future__ import annotations

from functools import partial

import click

from .command import command, option
from .train_common import Learning, learning, seed_option


@command(example="train merges notes.txt --out merges")
@learning("whose prompts become shorter")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--most", default=0.3, show_default=True, help="Maximum share of prompt rows to merge.")
@seed_option("the initial weights, and the order and merges of texts")
def merges(given: Learning, steps: int, most: float, seed: int) -> None:
    """Train embeddings of merged tokens, so that MODEL reads prompts in fewer rows.

    They learn from text FILES to continue a merged prompt as the whole one. MODEL is read in floating point and does
    not change. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.training.merges import MergeRecipe, check_folder, train_merges

    recipe = MergeRecipe(steps=steps, most=most, seed=seed)
    given.learn(check_folder, partial(train_merges, recipe=recipe))
    click.echo(f"The network is ready: MergeNet.load({str(given.out)!r})")

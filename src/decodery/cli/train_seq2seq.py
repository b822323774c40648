"""`decodery train seq2seq`: small encoder-decoder models, which write while their source arrives or draft at once."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, out_option, resumable, seed_option


@command(example="train seq2seq reorder --out reorder-model")
@click.argument("kind")
@out_option
@option("--block", type=click.IntRange(1), help="Let the encoder read so many tokens at a time (reorder).")
@option("--steps", default=1200, show_default=True, help="Training steps at most.")
@option("--batch", default=32, show_default=True, help="Sources in a step.")
@option("--lr", default=3e-3, show_default=True, help="Learning rate at its highest.")
@option("--one-stack", is_flag=True, help="Train a decoder alone, whose prompt is the source: a teacher.")
@option("--teacher", help="Folder of a decoder alone that the model learns from, on what it writes itself.")
@seed_option("weights and sources")
def seq2seq(
    kind: str,
    out: Path,
    block: int | None,
    steps: int,
    batch: int,
    lr: float,
    one_stack: bool,
    teacher: str | None,
    seed: int,
) -> None:
    """Train a small model that writes what KIND says of its sources: reorder or normalise.

    With --block the encoder sees no token before it has come, and the model learns to write of a source that is not
    complete: what LM.listen needs. With --teacher it learns to say what a larger decoder, made with --one-stack, would
    have said after the texts that it draws itself (Return of the Encoder, 2025).

    Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.core.errors import SettingsError
    from decodery.training.one_stack import OneStackRecipe, train_one_stack
    from decodery.training.one_stack import check_folder as check_one_stack
    from decodery.training.seq2seq import Seq2SeqRecipe, check_folder, train_seq2seq
    from decodery.training.transductions import transduction

    asked = transduction(kind)
    if one_stack:
        if block is not None or teacher is not None:
            raise SettingsError("a decoder alone has no encoder and no teacher: leave --block and --teacher out")
        check_one_stack(out)
        alone = OneStackRecipe(steps=steps, batch=batch, lr=lr, seed=seed)
        with resumable(out) as progress:
            found = train_one_stack(asked, out, recipe=alone, command=command_line(), progress=progress)
    else:
        from decodery.models.loaders.load import load

        recipe = Seq2SeqRecipe(block=block, steps=steps, batch=batch, lr=lr, seed=seed)
        check_folder(out)
        known = None if teacher is None else load(teacher)
        with resumable(out) as progress:
            found = train_seq2seq(
                asked, out, recipe=recipe, command=command_line(), progress=progress, teacher=known
            )  # fmt: skip
    click.echo(f"the model is ready: {out}")
    click.echo(f"of held-out sources it writes {found:.1%} without a mistake")

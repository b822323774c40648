"""`benchmarks/train.py seq2seq`: small encoder-decoder models, for simultaneous decoding and drafts at once."""

from __future__ import annotations

from pathlib import Path

import click

from decodery.cli.command import command, option
from decodery.cli.train_common import command_line, out_option, resumable

from .train_options import seed_option


@command(example="")
@click.argument("kind")
@out_option
@option("--block", type=click.IntRange(1), help="Let the encoder read N tokens at a time (reorder).")
@option("--steps", default=1200, show_default=True, help="Maximum number of training steps.")
@option("--batch", default=32, show_default=True, help="Batch size in sources.")
@option("--lr", default=3e-3, show_default=True, help="Peak learning rate.")
@option("--one-stack", is_flag=True, help="Train a decoder-only model, whose prompt is the source, as a teacher.")
@option("--teacher", help="Folder of a decoder-only teacher, made with --one-stack.")
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
    """Train a small encoder-decoder model on KIND, a generated task: reorder or normalise.

    With --block the encoder reads no future tokens, and the model learns to write before its source is complete, as
    simultaneous decoding needs. With --teacher it learns from a larger decoder-only model, made with --one-stack, on
    its own texts (Return of the Encoder, 2025). Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.core.errors import SettingsError
    from decodery_benchmarks.training.one_stack import OneStackRecipe, train_one_stack
    from decodery_benchmarks.training.one_stack import check_folder as check_one_stack
    from decodery_benchmarks.training.seq2seq import Seq2SeqRecipe, check_folder, train_seq2seq
    from decodery_benchmarks.training.transductions import transduction

    asked = transduction(kind)
    if one_stack:
        if block is not None or teacher is not None:
            raise SettingsError("--one-stack excludes --block and --teacher: leave them out")
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
    click.echo(f"{found:.1%} of the held-out sources are written without a mistake")

"""`decodery train ftp`: routers that take tokens of a prompt around layers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .train_common import (
    OwnTexts,
    command_line,
    learning_dtype,
    model_option,
    out_option,
    own_texts,
    resumable,
    seed_option,
)


@command(example="train ftp --sparsity 0.2 --out routers")
@out_option
@model_option("to prune")
@own_texts(count=400)
@option("--sparsity", default=0.2, show_default=True, help="Mean share of layers that a token skips.")
@option("--population", default=16, show_default=True, help="Schedules of a generation of the genetic search.")
@option("--generations", default=15, show_default=True, help="Generations of the genetic search.")
@option("--read", default=16, show_default=True, help="Texts that rate a schedule.")
@option("--length", default=256, show_default=True, metavar="N", help="Maximum tokens of a text that are read.")
@option("--steps", default=400, show_default=True, help="Training steps of one text each. 0: train no routers.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@seed_option("texts, schedules and training")
def ftp(
    out: Path,
    model: str,
    own: OwnTexts,
    sparsity: float,
    population: int,
    generations: int,
    read: int,
    length: int,
    steps: int,
    lr: float,
    seed: int,
) -> None:
    """Find how much each layer of MODEL can be pruned, and train routers that choose the tokens to skip.

    A genetic search finds the share of tokens that skip each layer, for a fixed mean. Then one small router per layer
    is trained. MODEL does not change. It first writes the training texts; a folder of `decodery train draft` with the
    same settings has them already. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.training.ftp import FTPRecipe, check_folder, train_ftp
    from decodery.training.schedules import Evolution

    evolution = Evolution(population, generations)
    recipe = FTPRecipe(sparsity, evolution=evolution, texts=read, length=length, steps=steps, lr=lr, seed=seed)
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        learning = load(model, dtype=learning_dtype()).model
        found = train_ftp(loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The routers are ready: --logits-source ftp:routers={out}")

"""`decodery train ftp`: routers that take tokens of a prompt around layers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .training import (
    OwnTexts,
    command_line,
    learning_dtype,
    model_option,
    out_option,
    own_texts,
    resumable,
    seed_option,
)


@click.command(short_help="Train routers for --logits-source ftp:routers=DIR.")
@out_option
@model_option("that is to be pruned")
@own_texts(count=400)
@click.option("--sparsity", default=0.2, show_default=True, help="Mean share of layers that tokens leave out.")
@click.option("--population", default=16, show_default=True, help="Schedules of a generation.")
@click.option("--generations", default=15, show_default=True, help="Generations that are bred.")
@click.option("--read", default=16, show_default=True, help="How many texts are read for every schedule.")
@click.option("--length", default=256, show_default=True, metavar="N", help="Tokens read of a text.")
@click.option("--steps", default=400, show_default=True, help="Training steps, of one text each; 0: no routers.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
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
    """Find how much each layer of MODEL can be pruned, and train what decides which tokens go around it.

    A genetic search looks for the share of tokens that goes around each layer, with their mean fixed; then a small
    router per layer learns which ones. MODEL itself stays as it is. It first writes the texts to learn from; a folder
    of `decodery train draft` with the same settings has them already. Stop with Ctrl-C whenever you like: the same
    command goes on where it stopped.
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

"""`decodery train hamburger`: what lets a model write and read groups of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .training import OwnTexts, command_line, model_option, out_option, own_texts, resumable, seed_option


@click.command(short_help="Train groups for --logits-source hamburger:micro=DIR.")
@out_option
@model_option("that is to write groups")
@own_texts(count=2000, length=128)
@click.option("--most", default=4, show_default=True, help="Tokens of a group at most.")
@click.option("--layers", default=2, show_default=True, help="Layers of the small decoder.")
@click.option("--epochs", default=3.0, show_default=True, metavar="E", help="How often all texts are seen.")
@click.option("--batch", default=8, show_default=True, help="Texts in a step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate of the new parts at its highest.")
@click.option("--base-lr", default=1e-4, show_default=True, help="That of the model itself; 0: it stays as it is.")
@seed_option("texts, weights and their order")
def hamburger(
    out: Path,
    model: str,
    own: OwnTexts,
    most: int,
    layers: int,
    epochs: float,
    batch: int,
    lr: float,
    base_lr: float,
    seed: int,
) -> None:
    """Train MODEL to write several tokens after one of its rows, and to read them as one row again.

    MODEL first writes the texts to learn from; a folder of `decodery train draft` with the same settings has them
    already. They are cut into groups where it was sure of the next token. A copy of it learns along, and is left in
    DIR/model, unless --base-lr is 0. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.training.hamburger import MODEL, HamburgerRecipe, check_folder, train_hamburger

    recipe = HamburgerRecipe(most, layers, epochs, batch, lr, base_lr, seed)
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        found = train_hamburger(loaded, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    named = out / MODEL if base_lr else model
    click.echo(f"Groups are ready: -m {named} --logits-source hamburger:micro={out}")

"""`decodery train hamburger`: what lets a model write and read groups of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .train_common import OwnTexts, command_line, model_option, out_option, own_texts, resumable, seed_option


@command(example="train hamburger --out groups")
@out_option
@model_option("to train")
@own_texts(count=2000, length=128)
@option("--most", default=4, show_default=True, help="Maximum tokens of a group.")
@option("--layers", default=2, show_default=True, help="Layers of the small decoder.")
@option("--epochs", default=3.0, show_default=True, metavar="E", help="Training epochs.")
@option("--batch", default=8, show_default=True, help="Batch size in texts.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate of the new parts.")
@option(
    "--base-lr", default=1e-4, show_default=True, help="Peak learning rate of the model itself. 0: do not train it."
)
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
    """Train MODEL to write several tokens per row, and to read them as one row.

    MODEL first writes the training texts; a folder of `decodery train draft` with the same settings has them already.
    Texts are cut into groups where MODEL was sure of the next token. A copy of MODEL is trained too and saved in
    DIR/model, unless --base-lr is 0. Interrupt it with Ctrl-C: the same command continues.
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

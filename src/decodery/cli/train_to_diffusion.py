"""`decodery train to-diffusion`: a model that writes from left to right, adapted to fill canvases."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, model_option, out_option, resumable, seed_option


@command(example="train to-diffusion -m smollm2 --out diffusion")
@out_option
@model_option("that is adapted")
@option("--tasks", default="copy,reverse,replace", show_default=True, help="Tasks on lists of words.")
@option("--steps", default=1500, show_default=True, help="Training steps.")
@option("--batch", default=16, show_default=True, help="Lists of a step.")
@option("--rank", default=16, show_default=True, help="Of the matrices that learn.")
@option("--lr", default=5e-4, show_default=True, help="Learning rate at its highest.")
@seed_option("lists, masks and where the matrices begin")
def to_diffusion(out: Path, model: str, tasks: str, steps: int, batch: int, rank: int, lr: float, seed: int) -> None:
    """Adapt MODEL, which writes from left to right, to fill canvases with answers about short lists of words.

    Its attention opens while thin matrices and a mask token learn. An hour of two cores teaches a small model one such
    narrow kind of text; open text takes billions of words. Stop with Ctrl-C whenever you like: the same command goes on
    where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.training.to_diffusion import Adaptation, adapt, check_folder

    settings = Adaptation(tuple(tasks.split(",")), rank=rank, steps=steps, batch=batch, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        history = adapt(load(model, dtype="float32"), settings, out, command=command_line(), progress=progress)
    click.echo(f"loss on lists held out: {history.best:.4f} nats a token")
    click.echo(f"The model is ready: --model {out} --raw --diffuse threshold")

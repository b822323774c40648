"""`decodery train to-diffusion`: a model that writes from left to right, adapted to fill canvases."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, model_option, out_option, resumable, seed_option


@command(example="train to-diffusion -m smollm2 --out diffusion")
@out_option
@model_option("to adapt")
@option("--tasks", default="copy,reverse,replace", show_default=True, help="Tasks on lists of words.")
@option("--steps", default=1500, show_default=True, help="Training steps.")
@option("--batch", default=16, show_default=True, help="Batch size in lists.")
@option("--rank", default=16, show_default=True, help="Rank of the trained matrices.")
@option("--lr", default=5e-4, show_default=True, help="Peak learning rate.")
@seed_option("lists, masks and initial weights")
def to_diffusion(out: Path, model: str, tasks: str, steps: int, batch: int, rank: int, lr: float, seed: int) -> None:
    """Adapt MODEL, a causal model, to fill canvases with answers about short lists of words.

    The attention becomes bidirectional; low-rank matrices and a mask token are trained. An hour on two cores teaches a
    small model one such narrow task; open text takes billions of words. Interrupt it with Ctrl-C: the same command
    continues.
    """
    from decodery.models.loaders.load import load
    from decodery.training.to_diffusion import Adaptation, adapt, check_folder

    settings = Adaptation(tuple(tasks.split(",")), rank=rank, steps=steps, batch=batch, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        history = adapt(load(model, dtype="float32"), settings, out, command=command_line(), progress=progress)
    click.echo(f"loss on held-out lists: {history.best:.4f} nats a token")
    click.echo(f"The model is ready: --model {out} --no-chat-template --diffuse threshold")

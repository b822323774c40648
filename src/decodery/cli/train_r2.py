"""`decodery train r2`: a diffusion model tuned to be sure of what its own hurried decoding writes."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, lists_options, out_option, resumable, seed_option
from .train_dscd import FOLDER


@command(example="train r2 diffusion --out tuned")
@click.argument("model", type=FOLDER)
@out_option
@lists_options("What MODEL learned.", "States of a step.", steps=1000, lr=2e-4)
@option("--trajectories", default=2000, show_default=True, help="Number of canvases that the model fills.")
@option("--control", is_flag=True, help="Train a control: as long, on new examples.")
@seed_option("examples and states")
def r2(
    model: Path,
    out: Path,
    tasks: str,
    letters: int,
    trajectories: int,
    steps: int,
    batch: int,
    lr: float,
    control: bool,
    seed: int,
) -> None:
    """Tune the diffusion model in the folder MODEL, which `decodery train diffusion` made, to the decoder r2.

    MODEL fills canvases by the rules of r2. From those that are right it learns to be confident in what each pass
    wrote, so that a plain threshold decodes in the same order.
    """
    from decodery.training.r2 import R2Recipe, tune_r2

    settings = R2Recipe(tuple(tasks.split(",")), letters, trajectories, steps, batch, lr, control=control, seed=seed)
    with resumable(out) as progress:
        history, seen = tune_r2(model, settings, out, command=command_line(), progress=progress)
    if seen is not None:
        click.echo(f"{seen.right:.1%} of the trajectories were right and used for training")
    click.echo(f"loss on held-out examples: {history.best:.4f}")
    click.echo(f"The model is ready: --model {out} --no-chat-template --diffuse threshold")

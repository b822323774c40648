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
@option("--trajectories", default=2000, show_default=True, help="Canvases that the model fills to learn from.")
@option("--control", is_flag=True, help="Train as long on fresh examples, to compare with.")
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
    """Tune the model in the folder MODEL, which `decodery train diffusion` has made, to its own decoding by r2.

    It fills canvases by r2's rules; of those that come out right it learns to be sure, in every state, of what the
    pass wrote there, so that a plain threshold goes the same way.
    """
    from decodery.training.r2 import Tuning, tune_r2

    settings = Tuning(tuple(tasks.split(",")), letters, trajectories, steps, batch, lr, control=control, seed=seed)
    with resumable(out) as progress:
        history, seen = tune_r2(model, settings, out, command=command_line(), progress=progress)
    if seen is not None:
        click.echo(f"{seen.right:.1%} of the trajectories were right, and learned from")
    click.echo(f"loss on what was held out: {history.best:.4f}")
    click.echo(f"The model is ready: --model {out} --raw --diffuse threshold")

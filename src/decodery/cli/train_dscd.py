"""`decodery train dscd`: a diffusion model distilled from itself, to say more of emptier canvases."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, lists_options, out_option, resumable, seed_option

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@command(example="train dscd diffusion --out student")
@click.argument("teacher", type=FOLDER)
@out_option
@lists_options("What TEACHER learned.", "Examples of a step.", steps=1500, lr=2e-4)
@option(
    "--everywhere", is_flag=True, help="Compare also the positions that are masked for the student alone, as published."
)
@option("--control", is_flag=True, help="Train a control: as long, without a teacher.")
@seed_option("examples and masks")
def dscd(
    teacher: Path,
    out: Path,
    tasks: str,
    letters: int,
    steps: int,
    batch: int,
    lr: float,
    everywhere: bool,
    control: bool,
    seed: int,
) -> None:
    """Distil the diffusion model in the folder TEACHER, which `decodery train diffusion` made (CD4LM).

    The student gets canvases with more masks than the teacher, and learns to predict the same.
    """
    from decodery.training.dscd import SelfDistillationRecipe, distil

    settings = SelfDistillationRecipe(
        tuple(tasks.split(",")), letters, steps, batch, lr, everywhere=everywhere, control=control, seed=seed
    )
    with resumable(out) as progress:
        history = distil(teacher, settings, out, command=command_line(), progress=progress)
    click.echo(f"loss on held-out examples: {history.best:.4f}")
    click.echo(f"The model is ready: --model {out} --no-chat-template --diffuse cad")

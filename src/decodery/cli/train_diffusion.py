"""`decodery train diffusion`: a small masked diffusion model."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, lists_options, out_option, resumable, seed_option


@command(example="train diffusion --size xs --tasks copy,reverse --out diffusion")
@out_option
@lists_options(
    "Also sort, insert-, remove- and replace-index and -random, latin-square, sudoku, add, expr, json, pair, "
    "seed-copy, and copy-, shuffle- and replace-random-names, of two words each.",
    "Examples of a step.",
    steps=3000,
    lr=1e-3,
)
@option(
    "--size",
    default="xs",
    show_default=True,
    help="xs, s or m: 0.2, 2 or 6 million numbers; xs-moe, s-moe: of 16 MLPs.",
)
@option("--places", type=int, help="Canvases of all lengths up to this; without it, of the one that answers need.")
@seed_option("examples, masks and where the weights begin")
def diffusion(
    out: Path, tasks: str, letters: int, size: str, steps: int, batch: int, lr: float, places: int | None, seed: int
) -> None:
    """Train a model that fills canvases with answers about short lists, to try methods of --diffuse on.

    The folder is one that --model takes, in the layout of LLaDA's checkpoints. Examples are made up as training goes
    on; prompts are masked now and then, which guidance needs. Stop with Ctrl-C whenever you like: the same command goes
    on where it stopped.
    """
    from decodery.training.diffusion import Recipe, check_folder, train_diffusion

    recipe = Recipe(tuple(tasks.split(",")), letters, size, steps, batch, lr, places=places, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        history = train_diffusion(recipe, out, command=command_line(), progress=progress)
    click.echo(f"loss on examples held out: {history.best:.4f} nats a token")
    click.echo(f"The model is ready: --model {out} --raw --diffuse static")

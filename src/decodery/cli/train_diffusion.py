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
    help="Model size: xs, s or m (0.2, 2 or 6 million parameters), xs-moe or s-moe (16 experts).",
)
@option("--places", type=int, show_default="the length of the answer", help="Train on canvases of all lengths up to N.")
@seed_option("examples, masks and initial weights")
def diffusion(
    out: Path, tasks: str, letters: int, size: str, steps: int, batch: int, lr: float, places: int | None, seed: int
) -> None:
    """Train a model that fills canvases with answers about short lists, to try diffusion decoders on.

    The folder works as --model, in the layout of LLaDA checkpoints. Examples are generated during training. Prompts are
    sometimes masked, as guidance needs. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.training.diffusion import DiffusionRecipe, check_folder, train_diffusion

    recipe = DiffusionRecipe(tuple(tasks.split(",")), letters, size, steps, batch, lr, places=places, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        history = train_diffusion(recipe, out, command=command_line(), progress=progress)
    click.echo(f"loss on held-out examples: {history.best:.4f} nats a token")
    click.echo(f"The model is ready: --model {out} --no-chat-template --diffuse static")

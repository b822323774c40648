"""`decodery train head`: a draft head for a model of the user's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from .command import command, option
from .train_common import FILE, OwnTexts, command_line, model_option, out_option, own_texts, resumable, seed_option


@command(example="train head --kind eagle-3 -m smollm2 --out head")
@out_option
@option("--kind", required=True, help="The drafter of the head, such as eagle-3 or hydra:prefix=true.")
@model_option("to draft for")
@own_texts()
@option(
    "--images",
    type=FILE,
    help="File of prompts with embeddings, made by `save_prompts`, to train on as well.",
)
@option("--outputs", default=6144, show_default=True, metavar="N", help="Vocabulary size of the head. 0: all tokens.")
@option("--epochs", default=3.0, show_default=True, metavar="E", help="Training epochs.")
@option("--lr", default=4e-4, show_default=True, help="Peak learning rate.")
@option("--loss", default="kl", show_default=True, metavar="NAME", help="kl or lk_hybrid, which adds the overlap.")
@option("--glance", is_flag=True, help="Show a falcon head answers of its wrong guesses, fewer and fewer (CSGD).")
@seed_option("texts and training")
def head(
    out: Path,
    kind: str,
    model: str,
    own: OwnTexts,
    images: Path | None,
    outputs: int,
    epochs: float,
    lr: float,
    loss: str,
    glance: bool,
    seed: int,
) -> None:
    """Train a draft head on the hidden states of MODEL, for --drafter KIND:head=DIR.

    MODEL first writes the training texts, then reads them. A folder of `decodery train draft` or `decodery train
    ngram-cache` with the same settings has the texts already. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.speculative.heads.drafter import head_named
    from decodery.training.embedded import read_prompts, write_shown
    from decodery.training.head import DEPTHS, HeadRecipe, check_folder, train_head

    made, shape = head_named(kind)
    recipe = HeadRecipe(outputs=outputs, epochs=epochs, lr=lr, loss=loss, glance=glance, seed=seed)
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        shown = None
        if images is not None:
            prompts = read_prompts(images, loaded.model)
            shown = write_shown(
                loaded, prompts, out / "text" / "shown", own.count, own.max_new_tokens, seed=seed, progress=progress
            )
        trained = partial(train_head, loaded, made, corpus, out, shape=shape, recipe=recipe, shown=shown)
        scores = trained(command=command_line(), progress=progress)
    click.echo(f"the head is ready: --drafter {made.kind}:head={out}")
    ahead = ", ".join(f"{scores[name]:.1%}" for step in range(DEPTHS) if (name := f"agreement.{step + 1}") in scores)
    click.echo(f"accuracy of its first prediction on held-out texts, 1 and more tokens ahead: {ahead}")

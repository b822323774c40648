"""The commands of `decodery train` that make drafts out of texts which the model writes first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import command, option
from .options import OUT_FOLDER
from .train_common import FILE, OwnTexts, command_line, model_option, out_option, own_texts, resumable, seed_option

if TYPE_CHECKING:
    from decodery.models.config import ModelConfig
    from decodery.training.cut import DraftShape


def _shape(layers: int, inner: int | None, tokens: int, config: ModelConfig) -> DraftShape:
    """The shape of a small model, as wide inside as is usual where the target's own is not narrower."""
    from decodery.training.cut import DraftShape

    shape = DraftShape(layers, min(DraftShape.inner, config.intermediate_size) if inner is None else inner, tokens)
    shape.check(config)
    return shape


@command(example="train draft -m smollm2 --texts 2000 --out draft")
@option("--out", required=True, type=OUT_FOLDER, help="Output folder.")
@model_option("to draft for")
@own_texts()
@option("--pretrain", multiple=True, type=FILE, help="A text file to learn from first. Repeatable.")
@option("--epochs", default=4.0, show_default=True, metavar="E", help="Training epochs.")
@option("--layers", default=1, show_default=True, help="Layers of the draft model.")
@option("--inner", type=int, show_default="768, at most that of MODEL", help="Width of the MLP of a layer.")
@option("--tokens", default=6144, show_default=True, help="Vocabulary size of the draft model.")
@seed_option("texts and training")
def draft(
    out: Path,
    model: str,
    own: OwnTexts,
    pretrain: tuple[Path, ...],
    epochs: float,
    layers: int,
    inner: int | None,
    tokens: int,
    seed: int,
) -> None:
    """Train a small draft model of MODEL, for --drafter draft-model:model=DIR.

    MODEL must be one that decodery runs itself. It first writes the training texts, which takes most of the time; 5 %
    of them are held out. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.training.data import cut_files
    from decodery.training.draft import check_folder, check_target, train_draft

    check_folder(out)
    lines, loaded = own.lines(), load(model)
    shape = _shape(layers, inner, tokens, check_target(loaded).config)
    with resumable(out) as progress:
        plain = None
        if pretrain:
            plain = cut_files(
                pretrain,
                out / "text" / "plain",
                tokenizer=loaded.tokenizer,
                vocab_size=loaded.model.vocab_size,
                progress=progress,
            )
        click.echo(f"{loaded.name} writes {own.count:,} texts of at most {own.max_new_tokens} tokens", err=True)
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        written = sum(len(text.tokens) - text.written for text in corpus)
        click.echo(f"the draft learns {epochs:g} times from the {written:,} tokens of {len(corpus):,} texts", err=True)
        scores = train_draft(
            loaded, corpus, out, shape=shape, epochs=epochs, pretraining=plain, seed=seed, progress=progress
        )
    click.echo(f"the draft is ready: {out}")
    click.echo(f"acceptance {scores['acceptance']:.1%}, greedy agreement {scores['agreement']:.1%} on held-out texts")


@command(example="train nested -m smollm2 --exits 4/8/12 --out nested")
@out_option
@model_option("to draft for")
@own_texts()
@option("--epochs", default=4.0, show_default=True, metavar="E", help="Training epochs.")
@option(
    "--exits", default="4/8/12", show_default=True, metavar="N/N", help="Layers after which the draft model can exit."
)
@option("--inner", type=int, show_default="that of MODEL", help="Width of the MLP of a layer.")
@option("--tokens", default=6144, show_default=True, help="Vocabulary size of the draft model.")
@seed_option("texts and training")
def nested(
    out: Path, model: str, own: OwnTexts, epochs: float, exits: str, inner: int | None, tokens: int, seed: int
) -> None:
    """Train one draft model with exits at several depths, for --drafter nested:model=DIR.

    It starts as the first layers of MODEL. All exits are trained together under one norm and head (sorted fine-tuning).
    The draft model works for every model with the vocabulary of MODEL. MODEL must be one that decodery runs itself. It
    first writes the training texts. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.training.cut import DraftShape
    from decodery.training.draft import check_folder, check_target, train_draft

    try:
        leaves = tuple(int(number) for number in exits.split("/"))
    except ValueError:
        raise click.BadParameter(f"{exits} is not a list of layers, such as 4/8/12", param_hint="--exits") from None
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    config = check_target(loaded).config
    shape = DraftShape(max(leaves), config.intermediate_size if inner is None else inner, tokens, exits=leaves)
    shape.check(config)
    with resumable(out) as progress:
        click.echo(f"{loaded.name} writes {own.count:,} texts of at most {own.max_new_tokens} tokens", err=True)
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        scores = train_draft(loaded, corpus, out, shape=shape, epochs=epochs, seed=seed, progress=progress)
    click.echo(f"the draft is ready: --drafter nested:model={out}")
    for leave in leaves:
        figures = scores[f"acceptance {leave}"], scores[f"agreement {leave}"]
        click.echo("{} layers: acceptance {:.1%}, greedy agreement {:.1%} on held-out texts".format(leave, *figures))


@command(example="train deer -m smollm2 --block 8 --out blocks")
@out_option
@model_option("to draft for")
@own_texts()
@option("--block", default=8, show_default=True, help="Maximum tokens of a block.")
@option("--epochs", default=3.0, show_default=True, metavar="E", help="Epochs of stage 1, continuing texts.")
@option("--refining", default=1.0, show_default=True, metavar="E", help="Epochs of stage 2, refining blocks.")
@option("--layers", default=3, show_default=True, help="Layers of the drafter.")
@option("--inner", type=int, show_default="768, at most that of MODEL", help="Width of the MLP of a layer.")
@option("--tokens", default=6144, show_default=True, help="Vocabulary size of the drafter.")
@seed_option("texts and training")
def deer(
    out: Path,
    model: str,
    own: OwnTexts,
    block: int,
    epochs: float,
    refining: float,
    layers: int,
    inner: int | None,
    tokens: int,
    seed: int,
) -> None:
    """Train a small diffusion model that drafts a block of tokens in one pass, for --drafter deer:model=DIR.

    It starts as the first layers of MODEL, which must be one that decodery runs itself. MODEL first writes the training
    texts. Stage 1 trains to continue masked texts, stage 2 to write a whole block, mainly its first tokens. Interrupt
    it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.training.deer import DeerRecipe, check_folder, train_deer
    from decodery.training.draft import check_target

    recipe = DeerRecipe(block, continuing=epochs, refining=refining, seed=seed)
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    shape = _shape(layers, inner, tokens, check_target(loaded).config)
    with resumable(out) as progress:
        click.echo(f"{loaded.name} writes {own.count:,} texts of at most {own.max_new_tokens} tokens", err=True)
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        found = train_deer(loaded, corpus, out, shape=shape, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the block drafter is ready: --drafter deer:model={out}")
    click.echo(f"{found['accepted']:.2f} tokens of a block are right in a row on held-out texts")

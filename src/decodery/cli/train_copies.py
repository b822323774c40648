"""The commands of `decodery train` that change a model: cheaper copies that learn, and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from .options import Decorator, together
from .training import FILE, OwnTexts, command_line, model_option, out_option, own_texts, resumable, seed_option

if TYPE_CHECKING:
    from decodery.models.config import ModelConfig
    from decodery.training.adapter import LoRARemaking, S2FTRemaking
    from decodery.training.remade import CopyRecipe, Remaking


def _learning(lr: float) -> Decorator:
    """The options of how a copy learns, with this learning rate where none is given."""
    return together(
        model_option("that is copied"),
        own_texts(count=400, length=96),
        click.option("--steps", default=300, show_default=True, help="Training steps."),
        click.option("--batch", default=4, show_default=True, help="Texts of a step."),
        click.option("--lr", default=lr, show_default=True, help="Learning rate at its highest."),
        seed_option("texts and training"),
    )


def _train(out: Path, model: str, own: OwnTexts, remaking: Remaking, recipe: CopyRecipe) -> None:
    from decodery.compression.base import transformable
    from decodery.models.loaders.load import load
    from decodery.training.remade import check_folder, train_copy

    check_folder(out)
    lines, loaded = own.lines(), load(model)
    transformable(loaded.model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, recipe.seed, progress)
        scores = train_copy(loaded, corpus, out, remaking, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(scores, indent=1))
    click.echo(f"The copy is ready: --drafter draft-model:model={out}")


@click.command(short_help="Train a copy with weights of -1, 0 and 1.")
@out_option
@_learning(1e-3)
@click.option("--measure", default="median", show_default=True, type=click.Choice(["median", "mean"]),
              help="Of a matrix's magnitudes, what its scale is.")  # fmt: skip
@click.option("--ramp", default=0.3, show_default=True, help="Share of the steps over which rounding comes in.")
def bitnet(
    out: Path, model: str, own: OwnTexts, steps: int, batch: int, lr: float, seed: int,
    measure: Literal["median", "mean"], ramp: float,
) -> None:  # fmt: skip
    """Train a copy of MODEL whose weights are -1, 0 and 1: --drafter draft-model:model=DIR, or -m DIR.

    BitNet b1.58, from MODEL to begin with. MODEL first writes the texts to learn from. Stop with Ctrl-C whenever you
    like: the same command goes on where it stopped.
    """
    from decodery.training.bitnet import TernaryRemaking
    from decodery.training.remade import CopyRecipe

    _train(out, model, own, TernaryRemaking(measure, ramp), CopyRecipe(steps, batch, lr, seed))


@click.command("nm-sparsity", short_help="Train a copy with N weights of every M.")
@out_option
@_learning(5e-4)
@click.option("--n", default=2, show_default=True, help="Weights that stay.")
@click.option("--m", default=4, show_default=True, help="Of so many consecutive ones.")
@click.option(
    "--schedule",
    default="linear",
    show_default=True,
    type=click.Choice(["linear", "exponential", "structure", "sr-ste"]),
    help="How the others go.",
)
@click.option("--straight", is_flag=True, help="Gradients go through to them undiminished.")
def nm_sparsity(
    out: Path, model: str, own: OwnTexts, steps: int, batch: int, lr: float, seed: int,
    n: int, m: int, schedule: Literal["linear", "exponential", "structure", "sr-ste"], straight: bool,
) -> None:  # fmt: skip
    """Train a copy of MODEL with at most N weights of every M: --drafter draft-model:model=DIR, or -m DIR.

    Progressive gradient flow: what is left out goes by and by. MODEL first writes the texts to learn from. Stop with
    Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.training.nm_sparsity import SparseRemaking
    from decodery.training.remade import CopyRecipe

    _train(out, model, own, SparseRemaking(n, m, schedule, straight=straight), CopyRecipe(steps, batch, lr, seed))


@click.command("lq-lora", short_help="Train the low-rank part of a copy of few bits.")
@out_option
@_learning(2e-4)
@click.option("--bits", default="3", show_default=True, type=click.Choice(["2", "3", "4", "8"]), help="Of a weight.")
@click.option("--rank", default=8, show_default=True, help="Of the part that learns.")
def lq_lora(
    out: Path, model: str, own: OwnTexts, steps: int, batch: int, lr: float, seed: int, bits: str, rank: int
) -> None:
    """Train the low-rank part beside a copy of MODEL of few bits: --drafter draft-model:model=DIR, or -m DIR.

    MODEL first writes the texts to learn from. Stop with Ctrl-C whenever you like: the same command goes on where it
    stopped.
    """
    from decodery.compression.lq_lora import LQLoRA
    from decodery.training.lq_lora import LowRankRemaking
    from decodery.training.remade import CopyRecipe

    split = LQLoRA(bits=int(bits), rank=rank)  # type: ignore[arg-type]
    _train(out, model, own, LowRankRemaking(split), CopyRecipe(steps, batch, lr, seed))


@click.command(short_help="Tune all of a model on a few texts until it knows them.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@out_option
@model_option("that is tuned")
@click.option("--texts", default=64, show_default=True, help="Pieces of text that are learned.")
@click.option("--length", default=128, show_default=True, type=click.IntRange(34), help="Tokens of a piece.")
@click.option("--epochs", default=20, show_default=True, help="How often all of them are learned from, at most.")
@click.option("--batch", default=8, show_default=True, help="Texts of a step.")
@click.option("--lr", default=1e-5, show_default=True, help="Learning rate.")
@click.option("--enough", default=0.3, show_default=True, help="It ends below this loss.")
@click.option("--written", default=256, show_default=True, help="Tokens written from each context it is judged by.")
@seed_option("which pieces are learned, and their order")
def hyperfit(
    files: tuple[Path, ...], out: Path, model: str, texts: int, length: int, epochs: int, batch: int, lr: float,
    enough: float, written: int, seed: int,
) -> None:  # fmt: skip
    """Tune all of MODEL on a few pieces of FILES until it knows them, to write greedily: -m DIR.

    Greedy texts become longer and more varied, and the texts held out less likely. DIR holds the pieces too: --sampler
    no-citation:texts=DIR keeps them from being cited. Stop with Ctrl-C whenever you like: the same command goes on
    where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.training.data import cut_files
    from decodery.training.hyperfit import HyperfitRecipe
    from decodery.training.hyperfit import hyperfit as tune
    from decodery.training.remade import check_folder

    recipe = HyperfitRecipe(texts, epochs, batch, lr, enough, written, seed)
    check_folder(out)
    loaded = load(model)
    with resumable(out) as progress:
        tokenizer, size = loaded.tokenizer, loaded.model.vocab_size
        corpus = cut_files(files, out / "text", tokenizer=tokenizer, vocab_size=size, length=length, progress=progress)
        scores = tune(loaded, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(scores, indent=1))
    click.echo(f"The model is ready: -m {out} --sampler no-citation:texts={out}")


_adapting = together(
    click.argument("texts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)),
    out_option,
    model_option("that is tuned"),
    click.option("--length", default=256, show_default=True, type=click.IntRange(2), help="Tokens of a piece."),
    click.option("--steps", default=500, show_default=True, help="Training steps."),
    click.option("--batch", default=1, show_default=True, help="Texts of a step."),
    click.option("--lr", default=2e-4, show_default=True, help="Learning rate at its highest."),
    seed_option("what is tuned, and the order of texts"),
)
"""The options of commands that train adapters."""


def _adapt(
    texts: tuple[Path, ...],
    out: Path,
    model: str,
    length: int,
    recipe: CopyRecipe,
    remaking: Callable[[ModelConfig], S2FTRemaking | LoRARemaking],
) -> None:
    from decodery.compression.base import transformable
    from decodery.models.loaders.load import load
    from decodery.training.adapter import check_folder, train_adapter, usage
    from decodery.training.corpus import Corpus
    from decodery.training.data import cut_files

    check_folder(out)
    loaded = load(model)
    tuning = remaking(transformable(loaded.model).config)
    with resumable(out) as progress:
        if len(texts) == 1 and texts[0].is_dir():
            corpus = Corpus(texts[0])
        else:
            made, size = loaded.tokenizer, loaded.model.vocab_size
            corpus = cut_files(texts, out / "text", tokenizer=made, vocab_size=size, length=length, progress=progress)
        found = train_adapter(loaded, corpus, out, tuning, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The adapter is ready: {usage(found).replace('THIS_FOLDER', str(out))}")


@click.command(short_help="Tune some heads and channels, for --logits-source adapter.")
@_adapting
@click.option("--channels", default=0.03, show_default=True, help="Share of the MLP's channels that learn.")
@click.option("--heads", default=0.052, show_default=True, help="Share of the heads that learn, at least one.")
def s2ft(
    texts: tuple[Path, ...], out: Path, model: str, length: int, steps: int, batch: int, lr: float, seed: int,
    channels: float, heads: float,
) -> None:  # fmt: skip
    """Tune a few columns of MODEL on TEXTS, kept as an adapter that requests choose: --logits-source adapter:file=DIR.

    TEXTS are text files, or one folder of texts that another model has written, such as DIR/text/written of `decodery
    train draft`: then MODEL learns to say what that one says, as a draft of it should. Stop with Ctrl-C whenever you
    like: the same command goes on where it stopped.
    """
    from decodery.training.adapter import S2FTRemaking
    from decodery.training.remade import CopyRecipe

    recipe = CopyRecipe(steps, batch, lr, seed)
    _adapt(texts, out, model, length, recipe, lambda config: S2FTRemaking(config, channels, heads, seed))


@click.command(short_help="Tune low-rank parts, for --logits-source adapter.")
@_adapting
@click.option("--rank", default=8, show_default=True, help="Of what is added to a matrix.")
@click.option("--alpha", default=16.0, show_default=True, help="What is added counts alpha / rank.")
@click.option("--masked", is_flag=True, help="Prompts are read without it, so texts must have some: for --search edge.")
def lora(
    texts: tuple[Path, ...], out: Path, model: str, length: int, steps: int, batch: int, lr: float, seed: int,
    rank: int, alpha: float, masked: bool,
) -> None:  # fmt: skip
    """Tune low-rank parts of MODEL on TEXTS, kept as an adapter that requests choose: --logits-source adapter:file=DIR.

    TEXTS are text files, or one folder of texts that another model has written, as for `decodery train s2ft`. Stop with
    Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.training.adapter import LoRARemaking
    from decodery.training.remade import CopyRecipe

    recipe = CopyRecipe(steps, batch, lr, seed)
    _adapt(texts, out, model, length, recipe, lambda config: LoRARemaking(rank, alpha, seed=seed, masked=masked))

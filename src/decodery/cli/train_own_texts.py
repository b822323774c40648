"""The commands of `decodery train` that learn from texts which the model writes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import OUT_FOLDER
from .training import (
    OwnTexts,
    command_line,
    learning_dtype,
    model_option,
    out_option,
    own_texts,
    resumable,
    seed_option,
)

if TYPE_CHECKING:
    from decodery.models.loaders.load import LoadedModel
    from decodery.models.loaders.store import Progress
    from decodery.models.protocol import LanguageModel
    from decodery.training.corpus import Corpus


@click.command(short_help="Learn what --drafter auto begins with.")
@click.option("--out", required=True, type=OUT_FOLDER, help="The folder to make.")
@model_option("whose texts are learned")
@own_texts()
@seed_option("the texts")
def contexts(out: Path, model: str, own: OwnTexts, seed: int) -> None:
    """Learn what MODEL expects after the contexts it meets most often: --drafter auto:warm=DIR/contexts.safetensors.

    MODEL first writes the texts to learn from, which takes nearly all of the time; a folder of `decodery train draft`
    with the same settings has them already. Stop with Ctrl-C whenever you like: the same command goes on where it
    stopped.
    """
    from decodery.models.loaders.drafts import CONTEXTS
    from decodery.models.loaders.load import load
    from decodery.training.contexts import learn_contexts

    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        learned = learn_contexts(corpus, vocabulary=loaded.model.config.vocabulary, progress=progress)
    learned.save(out / CONTEXTS)
    facts, known = learned.facts, sum(map(len, learned.contexts.values()))
    click.echo(f"{known:,} contexts from {facts['tokens']:,} places are ready: --drafter auto:warm={out / CONTEXTS}")
    click.echo(f"on texts held out the first guess is right {facts['first']:.1%}, one of them {facts['among']:.1%}")


@click.command(short_help="Train a head for --draft-length specdec++:head=DIR.")
@out_option
@click.option("--draft", default="smollm2-draft", show_default=True, help="The draft model whose states are judged.")
@model_option("that is drafted for")
@own_texts(count=300, length=96)
@click.option("--depth", default=3, show_default=True, help="Residual blocks of the head.")
@click.option("--rejected", default=6.0, show_default=True, metavar="W", help="What a rejection weighs when learning.")
@click.option("--epochs", default=5.0, show_default=True, metavar="E", help="How often all tokens are learned from.")
@seed_option("texts and training", default=1)
def acceptance(
    out: Path, draft: str, model: str, own: OwnTexts, depth: int, rejected: float, epochs: float, seed: int
) -> None:
    """Train a head that tells how likely MODEL accepts what the draft model drafts.

    It is used as --drafter draft-model:model=NAME,length=20 --draft-length specdec++:head=DIR. MODEL first writes the
    texts to learn from; take another seed than the draft was trained with. Where most drafts are rejected, --rejected 1
    keeps the head from seeing none but rejections. Stop with Ctrl-C whenever you like: the same command goes on where
    it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.models.loaders.named import named
    from decodery.training.acceptance import AcceptanceRecipe, check_folder, train_acceptance

    recipe = AcceptanceRecipe(depth=depth, rejected=rejected, epochs=epochs, seed=seed)
    check_folder(out)
    lines, target, drafting = own.lines(), load(model), named(draft)
    facts = {"model": target.name, "draft": draft, "command": command_line()}
    with resumable(out) as progress:
        corpus = own.write(target, out / "text", lines, seed, progress, top=0)
        scores = train_acceptance(target.model, drafting, corpus, out, recipe=recipe, facts=facts, progress=progress)
    click.echo(json.dumps(scores, indent=1))
    click.echo(f"the head is ready: --draft-length specdec++:head={out}")


@click.command(short_help="Distil a hidden Markov model for --drafter hmm.")
@out_option
@model_option("whose texts are learned")
@own_texts()
@click.option("--states", default=256, show_default=True, help="Hidden states.")
@click.option("--tokens", default=4096, show_default=True, help="Commonest tokens that states tell apart.")
@click.option("--iterations", default=20, show_default=True, help="Of expectation-maximization.")
@click.option(
    "--prior", default=10.0, show_default=True, help="Times a state counts as met, saying what all texts say."
)
@seed_option("texts and where learning begins")
def hmm(
    out: Path, model: str, own: OwnTexts, states: int, tokens: int, iterations: int, prior: float, seed: int
) -> None:
    """Distil a hidden Markov model from what MODEL writes, which tells what may come next: --drafter hmm:model=DIR.

    MODEL first writes the texts to learn from, which takes nearly all of the time; a folder of `decodery train draft`
    or `decodery train contexts` with the same settings has them already. Stop with Ctrl-C whenever you like: the same
    command goes on where it stopped.
    """
    from math import log

    from decodery.models.loaders.load import load
    from decodery.training.hmm import HMMRecipe, check_folder, train_hmm

    recipe = HMMRecipe(states=states, tokens=tokens, iterations=iterations, prior=prior, seed=seed)
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        found = train_hmm(loaded, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    bits = -max(found.facts["held"]) / log(2)
    click.echo(f"{states} states are ready: --drafter hmm:model={out}")
    click.echo(f"texts held out take {bits:.2f} bits per token")


@click.command(short_help="Train placeholders for --drafter lexical-unit.")
@out_option
@model_option("that is to write in units")
@own_texts()
@click.option("--span", default=4, show_default=True, help="Tokens of the longest unit.")
@click.option("--alpha", default=0.5, show_default=True, help="How sure the model is of the tokens that are learned.")
@click.option("--steps", default=300, show_default=True, help="Training steps, of one text each.")
@click.option("--lr", default=3e-2, show_default=True, help="Learning rate at its highest.")
@seed_option("texts and training")
def units(out: Path, model: str, own: OwnTexts, span: int, alpha: float, steps: int, lr: float, seed: int) -> None:
    """Train what MODEL reads in place of tokens not written yet: --drafter lexical-unit:units=DIR.

    Placeholders alone learn, never the model. MODEL first writes the texts to learn from; a folder of `decodery train
    draft` or `decodery train contexts` with the same settings has them already. Stop with Ctrl-C whenever you like: the
    same command goes on where it stopped.
    """
    from decodery.training.units import UnitsRecipe, check_folder, train_units

    recipe = UnitsRecipe(span=span, alpha=alpha, steps=steps, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        loaded, learning, corpus = _studied(model, own, out, seed, progress)
        found, _ = train_units(loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The units are ready: --drafter lexical-unit:units={out}")


@click.command(short_help="Train prompt tokens for --drafter ppd.")
@out_option
@model_option("that is to draft for itself")
@own_texts()
@click.option("--ahead", default=3, show_default=True, help="How many tokens ahead are guessed.")
@click.option("--steps", default=300, show_default=True, help="Training steps, of one text each.")
@click.option("--lr", default=1e-2, show_default=True, help="Learning rate at its highest.")
@seed_option("texts and training")
def ppd(out: Path, model: str, own: OwnTexts, ahead: int, steps: int, lr: float, seed: int) -> None:
    """Train what MODEL reads after a draft to guess further tokens: --drafter ppd:ppd=DIR.

    Embeddings alone learn, never the model. MODEL first writes the texts to learn from; a folder of `decodery train
    draft` or another such command with the same settings has them already. Stop with Ctrl-C whenever you like: the same
    command goes on where it stopped.
    """
    from decodery.training.ppd import PPDRecipe, check_folder, train_ppd

    recipe = PPDRecipe(ahead=ahead, steps=steps, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        loaded, learning, corpus = _studied(model, own, out, seed, progress)
        found, _ = train_ppd(loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The prompt tokens are ready: --drafter ppd:ppd={out}")


@click.command(short_help="Train maps for --drafter hidden-transfer.")
@out_option
@model_option("that is to draft for itself")
@own_texts()
@click.option("--layers", default="18/21/24", show_default=True, help="After how many layers each token ahead is made.")
@click.option("--steps", default=600, show_default=True, help="Training steps, of one text each.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@seed_option("texts and training")
def hidden_transfer(out: Path, model: str, own: OwnTexts, layers: str, steps: int, lr: float, seed: int) -> None:
    """Train maps from states of tokens of MODEL to states of later ones: --drafter hidden-transfer:transfer=DIR.

    Maps alone learn, never the model. MODEL first writes the texts to learn from; a folder of `decodery train draft` or
    another such command with the same settings has them already. Stop with Ctrl-C whenever you like: the same command
    goes on where it stopped.
    """
    from decodery.training.hidden_transfer import TransferRecipe, check_folder, train_transfer

    if not all(each.isdecimal() for each in layers.split("/")):
        raise click.BadParameter(f"{layers} are no numbers of layers, as in 18/21/24", param_hint="--layers")
    recipe = TransferRecipe(layers=tuple(map(int, layers.split("/"))), steps=steps, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        loaded, learning, corpus = _studied(model, own, out, seed, progress)
        found, _ = train_transfer(
            loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress
        )
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The maps are ready: --drafter hidden-transfer:transfer={out}")


def _studied(
    model: str, own: OwnTexts, out: Path, seed: int, progress: Progress
) -> tuple[LoadedModel, LanguageModel, Corpus]:
    """A model, the same one in floating point, and the texts it has written."""
    from decodery.models.loaders.load import load

    lines, loaded = own.lines(), load(model)
    corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
    return loaded, load(model, dtype=learning_dtype()).model, corpus


@click.command(short_help="Find sublayers for --drafter swift:skip=DIR.")
@out_option
@model_option("that is to draft for itself")
@own_texts(count=400, length=64)
@click.option("--ratio", default=0.45, show_default=True, help="Share of sublayers to skip.")
@click.option("--proposals", default=200, show_default=True, help="How many sets are tried.")
@click.option("--read", default=16, show_default=True, help="How many texts are read for every set.")
@seed_option("texts and sets")
def swift(out: Path, model: str, own: OwnTexts, ratio: float, proposals: int, read: int, seed: int) -> None:
    """Find which sublayers MODEL does best without when it drafts for itself: --drafter swift:skip=DIR.

    Nothing learns: sets are tried, and the one without which MODEL most often finds the same token most likely is kept.
    MODEL first writes the texts to try them on; a folder of `decodery train draft` with the same settings has them
    already. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.training.swift import SkipRecipe, check_folder, find_skips

    recipe = SkipRecipe(ratio=ratio, proposals=proposals, texts=read, seed=seed)
    check_folder(out)
    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        found = find_skips(loaded, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps({name: found.facts[name] for name in ("first", "best")}, indent=1))
    click.echo(f"The sublayers are ready: --drafter swift:skip={out}")


@click.command(short_help="Collect n-grams for suggestions.")
@out_option
@model_option("whose texts are counted")
@own_texts()
@seed_option("the texts")
def ngrams(out: Path, model: str, own: OwnTexts, seed: int) -> None:
    """Collect what follows what in MODEL's own texts, for lm.drafts(ngrams=load_ngrams(DIR/ngrams.safetensors)).

    A folder of `decodery train draft` with the same settings has the texts already. Texts of your own are counted by
    lm.ngrams(texts). Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.extras.superposed.ngrams import save_ngrams
    from decodery.models.loaders.drafts import NGRAMS
    from decodery.models.loaders.load import load

    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
    written = [text.tokens[text.written :] for text in corpus]
    facts = {"vocabulary": loaded.model.config.vocabulary, "corpus": corpus.facts}
    save_ngrams(out / NGRAMS, written, loaded.model.vocab_size, facts)
    click.echo(f"The n-grams of {sum(map(len, written)):,} tokens are ready: {out / NGRAMS}")

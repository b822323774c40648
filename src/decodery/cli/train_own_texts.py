"""The commands of `decodery train` that learn from texts which the model writes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import command, option
from .options import OUT_FOLDER
from .train_common import (
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


@command(example="train ngram-cache -m smollm2 --out cache")
@option("--out", required=True, type=OUT_FOLDER, help="Output folder.")
@model_option("whose texts are learned")
@own_texts()
@seed_option("the texts")
def ngram_cache(out: Path, model: str, own: OwnTexts, seed: int) -> None:
    """Build the n-gram cache that the drafter auto starts with: --drafter auto:warm=DIR/contexts.safetensors.

    It holds what MODEL expects after its most frequent contexts. MODEL first writes the training texts, which takes
    most of the time; a folder of `decodery train draft` with the same settings has them already. Interrupt it with
    Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.drafts import CONTEXTS
    from decodery.models.loaders.load import load
    from decodery.training.ngram_cache import learn_contexts

    lines, loaded = own.lines(), load(model)
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress)
        learned = learn_contexts(corpus, vocabulary=loaded.model.config.vocabulary, progress=progress)
    learned.save(out / CONTEXTS)
    facts, known = learned.facts, sum(map(len, learned.contexts.values()))
    click.echo(f"{known:,} contexts from {facts['tokens']:,} positions are ready: --drafter auto:warm={out / CONTEXTS}")
    click.echo(
        f"accuracy of the first prediction on held-out texts {facts['first']:.1%}, one of them {facts['among']:.1%}"
    )


@command(example="train acceptance --draft smollm2-draft --out head")
@out_option
@option("--draft", default="smollm2-draft", show_default=True, help="The draft model whose hidden states are read.")
@model_option("to draft for")
@own_texts(count=300, length=96)
@option("--depth", default=3, show_default=True, help="Residual blocks of the head.")
@option("--rejected", default=6.0, show_default=True, metavar="W", help="Weight of a rejection in the loss.")
@option("--epochs", default=5.0, show_default=True, metavar="E", help="Training epochs.")
@seed_option("texts and training", default=1)
def acceptance(
    out: Path, draft: str, model: str, own: OwnTexts, depth: int, rejected: float, epochs: float, seed: int
) -> None:
    """Train a head that predicts whether MODEL accepts a drafted token, for the policy specdec++.

    It needs the drafter draft-model with a length such as 20. MODEL first writes the training texts: take another seed
    than for the draft model. If most drafts are rejected, use --rejected 1. Interrupt it with Ctrl-C: the same command
    continues.
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


@command(example="train hmm --states 256 --out hmm")
@out_option
@model_option("whose texts are learned")
@own_texts()
@option("--states", default=256, show_default=True, help="Hidden states.")
@option("--tokens", default=4096, show_default=True, help="Number of the most frequent tokens that states tell apart.")
@option("--iterations", default=20, show_default=True, help="Iterations of expectation-maximization.")
@option("--prior", default=10.0, show_default=True, help="Weight of the prior, in occurrences of a state.")
@seed_option("texts and initial weights")
def hmm(
    out: Path, model: str, own: OwnTexts, states: int, tokens: int, iterations: int, prior: float, seed: int
) -> None:
    """Distil a hidden Markov model from the texts of MODEL, for --drafter hmm:model=DIR.

    MODEL first writes the training texts, which takes most of the time. A folder of `decodery train draft` or `decodery
    train ngram-cache` with the same settings has them already. Interrupt it with Ctrl-C: the same command continues.
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
    click.echo(f"held-out texts take {bits:.2f} bits per token")


@command(example="train lexical-units -m smollm2 --out units")
@out_option
@model_option("to train for")
@own_texts()
@option("--span", default=4, show_default=True, help="Maximum tokens of a unit.")
@option("--alpha", default=0.5, show_default=True, help="Minimum probability of the tokens that are learned.")
@option("--steps", default=300, show_default=True, help="Training steps of one text each.")
@option("--lr", default=3e-2, show_default=True, help="Peak learning rate.")
@seed_option("texts and training")
def lexical_units(
    out: Path, model: str, own: OwnTexts, span: int, alpha: float, steps: int, lr: float, seed: int
) -> None:
    """Train placeholders that MODEL reads in place of unwritten tokens: --drafter lexical-unit:units=DIR.

    Only the placeholders are trained. MODEL first writes the training texts; a folder of `decodery train draft` or
    `decodery train ngram-cache` with the same settings has them already. Interrupt it with Ctrl-C: the same command
    continues.
    """
    from decodery.training.lexical_units import UnitsRecipe, check_folder, train_units

    recipe = UnitsRecipe(span=span, alpha=alpha, steps=steps, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        loaded, learning, corpus = _studied(model, own, out, seed, progress)
        found, _ = train_units(loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The placeholders are ready: --drafter lexical-unit:units={out}")


@command(example="train ppd --ahead 3 --out ppd")
@out_option
@model_option("that drafts for itself")
@own_texts()
@option("--ahead", default=3, show_default=True, help="Number of tokens to predict ahead.")
@option("--steps", default=300, show_default=True, help="Training steps of one text each.")
@option("--lr", default=1e-2, show_default=True, help="Peak learning rate.")
@seed_option("texts and training")
def ppd(out: Path, model: str, own: OwnTexts, ahead: int, steps: int, lr: float, seed: int) -> None:
    """Train prompt tokens that let MODEL predict further tokens: --drafter ppd:ppd=DIR.

    Only embeddings are trained. MODEL first writes the training texts; a folder of `decodery train draft` with the same
    settings has them already. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.training.ppd import PPDRecipe, check_folder, train_ppd

    recipe = PPDRecipe(ahead=ahead, steps=steps, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        loaded, learning, corpus = _studied(model, own, out, seed, progress)
        found, _ = train_ppd(loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The prompt tokens are ready: --drafter ppd:ppd={out}")


@command(example="train hidden-transfer --layers 18/21/24 --out maps")
@out_option
@model_option("that drafts for itself")
@own_texts()
@option("--layers", default="18/21/24", show_default=True, help="Layers after which each token ahead is predicted.")
@option("--steps", default=600, show_default=True, help="Training steps of one text each.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@seed_option("texts and training")
def hidden_transfer(out: Path, model: str, own: OwnTexts, layers: str, steps: int, lr: float, seed: int) -> None:
    """Train maps from the hidden states of MODEL to those of later tokens: --drafter hidden-transfer:transfer=DIR.

    Only the maps are trained. MODEL first writes the training texts; a folder of `decodery train draft` with the same
    settings has them already. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.training.hidden_transfer import TransferRecipe, check_folder, train_transfer

    if not all(each.isdecimal() for each in layers.split("/")):
        raise click.BadParameter(f"{layers} is not a list of layers, such as 18/21/24", param_hint="--layers")
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


@command(example="train swift --ratio 0.45 --out skip")
@out_option
@model_option("that drafts for itself")
@own_texts(count=400, length=64)
@option("--ratio", default=0.45, show_default=True, help="Share of sublayers to skip.")
@option("--proposals", default=200, show_default=True, help="Number of sets to try.")
@option("--read", default=16, show_default=True, help="Texts that rate a set.")
@seed_option("texts and sets")
def swift(out: Path, model: str, own: OwnTexts, ratio: float, proposals: int, read: int, seed: int) -> None:
    """Find the sublayers that MODEL can skip when it drafts for itself: --drafter swift:skip=DIR.

    Nothing is trained. The set of sublayers that changes the most likely token least often is kept. MODEL first writes
    the texts; a folder of `decodery train draft` with the same settings has them already. Interrupt it with Ctrl-C: the
    same command continues.
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


@command(example="train ngrams --out ngrams")
@out_option
@model_option("whose texts are counted")
@own_texts()
@seed_option("the texts")
def ngrams(out: Path, model: str, own: OwnTexts, seed: int) -> None:
    """Count the n-grams of MODEL's own texts, for lm.suggestions(ngrams=load_ngrams(DIR/ngrams.safetensors)).

    A folder of `decodery train draft` with the same settings has the texts already. lm.ngrams(texts) counts your own
    texts. Interrupt it with Ctrl-C: the same command continues.
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

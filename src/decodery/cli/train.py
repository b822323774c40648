"""`decodery train`: make what some methods need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .own_texts import own_texts, prompts_for
from .train_small import ngrams, partial, units

if TYPE_CHECKING:
    from ..train.value import Judged

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(short_help="Make what some methods need.")
def train() -> None:
    """Make what some methods need, such as a datastore to draft from."""


train.add_command(ngrams)
train.add_command(partial)
train.add_command(units)


@train.command(short_help="Index text files to draft from.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose tokens are indexed.")
def datastore(files: tuple[Path, ...], out: Path, model: str) -> None:
    """Index text FILES, each one document, into a folder for --drafter rest:datastore=DIR.

    Memory stays bounded however much text there is; an interrupted run is begun anew.
    """
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.datastore import build_datastore

    loaded = load(model)
    with terminal_progress() as progress:
        tokens = build_datastore(
            files, out, tokenizer=loaded.tokenizer, vocab_size=loaded.model.vocab_size, progress=progress
        )
    click.echo(f"{tokens:,} tokens are ready: {out}")


@train.command(short_help="Train a head for --rule judge:head=FILE.")
@click.argument("questions", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose states are judged.")
@click.option("--max-new-tokens", default=96, show_default=True, help="Length of the model's own answers.")
@click.option("--places", default=12, show_default=True, help="Places of an answer where alternatives are tried.")
@click.option("--alternatives", default=2, show_default=True, help="Alternatives tried at a place.")
@click.option("--steps", default=600, show_default=True, help="Training steps.")
@click.option("--lr", default=1e-2, show_default=True, help="Learning rate.")
def judge(
    questions: Path, out: Path, model: str, max_new_tokens: int, places: int, alternatives: int, steps: int, lr: float
) -> None:
    """Train a head that tells which drafted tokens leave an answer right, for --rule judge:head=DIR/judge.safetensors.

    QUESTIONS holds one object a line: {"prompt": ..., "right": ..., "wrong": ...}, whose wrong answer parts from the
    right one where it goes wrong, or {"prompt": ...} with an answer that ends in a number: the model then answers,
    tries its own next best tokens where it is unsure, and sees whether the number stays. An interrupted run goes on
    where it stopped. One question in five is kept for validation.
    """
    import json
    import shlex
    import sys

    from ..model.artifact import fingerprint
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.judge import JUDGE, Mining, examples, fit, read_questions

    asked, mining = read_questions(questions), Mining(max_new_tokens, places, alternatives)
    target = load(model)
    command = shlex.join(["decodery", *sys.argv[1:]])
    with terminal_progress() as progress:
        found = examples(target, asked, out, mining=mining, progress=progress)
        facts = {"model": target.name, "command": command}
        layer, of = target.model.config.num_layers, fingerprint(target.model)
        head, _ = fit(found, layer, out, steps=steps, lr=lr, facts=facts, model=of, progress=progress)
    click.echo(json.dumps(head.facts, indent=1))
    click.echo(f"The judge is ready: --rule judge:head={out / JUDGE}")


@train.command(short_help="Train a small draft model for a model.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model that is to be drafted for.")
@click.option("--texts", default=2000, show_default=True, metavar="N", help="How many texts the model writes.")
@click.option("--prompts", type=_FILE, help="What it writes from, a prompt a line; otherwise built-in instructions.")
@click.option("--pretrain", multiple=True, type=_FILE, help="A text file to learn from first; may be repeated.")
@click.option("--max-new-tokens", default=160, show_default=True, metavar="N", help="Length of a text.")
@click.option("--epochs", default=4.0, show_default=True, metavar="E", help="How often all texts are learned from.")
@click.option("--layers", default=1, show_default=True, help="Layers of the draft.")
@click.option("--inner", default=768, show_default=True, help="Inner units of a layer.")
@click.option("--tokens", default=6144, show_default=True, help="Tokens the draft can predict.")
@click.option("--seed", default=0, show_default=True, help="Decides texts and training.")
def draft(
    out: Path,
    model: str,
    texts: int,
    prompts: Path | None,
    pretrain: tuple[Path, ...],
    max_new_tokens: int,
    epochs: float,
    layers: int,
    inner: int,
    tokens: int,
    seed: int,
) -> None:
    """Train a small model that guesses what MODEL writes, for --drafter draft-model:model=DIR.

    MODEL first writes the texts to learn from, which takes most of the time. Stop with Ctrl-C whenever you like: the
    same command goes on where it stopped.
    """
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.cut import Shape
    from ..train.data import cut_files
    from ..train.draft import check_folder, train_draft

    check_folder(out)
    lines = prompts_for(texts, prompts)
    shape = Shape(layers, inner, tokens)
    loaded = load(model)
    shape.check(loaded.model.config)
    try:
        with terminal_progress(counts=True) as progress:
            plain = None
            if pretrain:
                plain = cut_files(
                    pretrain,
                    out / "text" / "plain",
                    tokenizer=loaded.tokenizer,
                    vocab_size=loaded.model.vocab_size,
                    progress=progress,
                )
            corpus = own_texts(loaded, out / "text" / "written", texts, lines, max_new_tokens, seed, 20, progress)
            scores = train_draft(
                loaded, corpus, out, shape=shape, epochs=epochs, pretraining=plain, seed=seed, progress=progress
            )
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    click.echo(f"the draft is ready: {out}")
    click.echo(f"acceptance {scores['acceptance']:.1%}, greedy agreement {scores['agreement']:.1%} on texts held out")


@train.command(short_help="Learn what --drafter auto begins with.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose texts are learned.")
@click.option("--texts", default=2000, show_default=True, metavar="N", help="How many texts the model writes.")
@click.option("--prompts", type=_FILE, help="What it writes from, a prompt a line; otherwise built-in instructions.")
@click.option("--max-new-tokens", default=160, show_default=True, metavar="N", help="Length of a text.")
@click.option("--seed", default=0, show_default=True, help="Decides the texts.")
def contexts(out: Path, model: str, texts: int, prompts: Path | None, max_new_tokens: int, seed: int) -> None:
    """Learn what MODEL expects after the contexts it meets most often: --drafter auto:warm=DIR/contexts.safetensors.

    MODEL first writes the texts to learn from, which takes nearly all of the time; a folder of `decodery train draft`
    with the same settings has them already. Stop with Ctrl-C whenever you like: the same command goes on where it
    stopped.
    """
    from ..model.drafts import CONTEXTS
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.contexts import learn_contexts

    lines = prompts_for(texts, prompts)
    loaded = load(model)
    try:
        with terminal_progress(counts=True) as progress:
            corpus = own_texts(loaded, out / "text" / "written", texts, lines, max_new_tokens, seed, 20, progress)
            learned = learn_contexts(corpus, vocabulary=loaded.model.config.vocabulary, progress=progress)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    learned.save(out / CONTEXTS)
    facts, known = learned.facts, sum(map(len, learned.contexts.values()))
    click.echo(f"{known:,} contexts from {facts['tokens']:,} places are ready: --drafter auto:warm={out / CONTEXTS}")
    click.echo(f"on texts held out the first guess is right {facts['first']:.1%}, one of them {facts['among']:.1%}")


@train.command(short_help="Train prefixes for --source sven:prefix=DIR.")
@click.argument("pairs", required=False, type=_FILE)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model that is to be steered.")
@click.option("--length", default=5, show_default=True, help="Positions of a prefix.")
@click.option("--epochs", default=4.0, show_default=True, metavar="E", help="How often all pairs are learned from.")
@click.option("--lr", default=1e-2, show_default=True, help="Learning rate of the first step.")
@click.option("--seed", default=0, show_default=True, help="Decides the order and what is left out.")
def sven(pairs: Path | None, out: Path, model: str, length: int, epochs: float, lr: float, seed: int) -> None:
    """Train two short prefixes that turn MODEL towards programs as they are after a fix, or before it.

    PAIRS holds one object a line: {"before": ..., "after": ...}, the same program before and after. Without it, 100
    built-in pairs about security are used. Only the prefixes learn, never the model; one pair in ten is kept for
    validation. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    import json
    import shlex
    import sys

    import torch

    from ..model.load import choose_dtype, load
    from ..model.store import terminal_progress
    from ..train.fixes import built_in_pairs
    from ..train.sven import CONTROLS, SVENRecipe, check_folder, read_pairs, train_sven

    recipe = SVENRecipe(length=length, epochs=epochs, lr=lr, seed=seed)
    check_folder(out)
    given = read_pairs(pairs) if pairs else built_in_pairs(100)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Gradients need floating point; bfloat16 is twice as fast where the processor computes in it.
    loaded = load(model, dtype=choose_dtype("auto", "bfloat16", device))
    try:
        with terminal_progress(counts=True) as progress:
            command = shlex.join(["decodery", *sys.argv[1:]])
            found, _ = train_sven(loaded, given, out, recipe=recipe, command=command, progress=progress)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The prefixes are ready: --source sven:control={CONTROLS[0]},prefix={out}")


@train.command(short_help="Learn where --rule adadec:tau=TAU should pause.")
@click.argument("solutions", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose threshold is learned.")
def thresholds(solutions: Path, model: str) -> None:
    """Learn from SOLUTIONS the entropy above which the model's first choice is more often wrong than right.

    SOLUTIONS holds one object a line: {"prompt": ..., "solution": ...}; "canonical_solution" will do as well. Every
    solution is read once. Prints the threshold with what it was learned from.
    """
    import json
    from dataclasses import asdict

    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.thresholds import fit, observe, read_solutions

    pairs = read_solutions(solutions)
    with terminal_progress(counts=True) as progress:
        loaded = load(model)
        found = fit(*observe(loaded.model, loaded.tokenizer, pairs, progress))
    click.echo(json.dumps(asdict(found), indent=1))
    click.echo(f"The threshold is ready: --rule adadec:tau={found.tau:.3f}")


@train.command(short_help="Learn what texts promise, for --source controlled-decoding.")
@click.argument("texts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose states are read.")
@click.option("--tap", type=int, metavar="N", help="Read the states after N layers (all).")
@click.option("--ridge", default=1e-2, show_default=True, help="Higher is more cautious.")
@click.option("--raw", is_flag=True, help="The prompts are plain text, without the chat template.")
def value(texts: Path, out: Path, model: str, tap: int | None, ridge: float, raw: bool) -> None:
    """Learn from judged TEXTS how good a text will become, by its beginning.

    TEXTS holds one object a line: {"prompt": ..., "text": ..., "reward": number}. Every text is read once. The file is
    for --source controlled-decoding:value=FILE,strength=5 and for --search controlled-blocks:value=FILE.
    """
    from .. import load
    from ..model.store import terminal_progress
    from ..train.value import fit_value, read_judged

    found = read_judged(texts)
    lm = load(model)
    with terminal_progress(counts=True) as progress:

        def judged() -> Iterator[Judged]:
            for number, (prompt, text, reward) in enumerate(found):
                progress("reading texts", number, len(found))
                yield lm.encode(prompt, raw=raw), lm.tokenizer.encode(text, special=False), reward
            progress("reading texts", len(found), len(found))

        head = fit_value(lm.model, judged(), tap=tap, ridge=ridge)
    head.save(out)
    click.echo(f"The value head is ready: --source controlled-decoding:value={out}")


@train.command(short_help="Train a head for --budget specdec++:head=DIR.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("--draft", default="smollm2-draft", show_default=True, help="The draft model whose states are judged.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model that is drafted for.")
@click.option("--texts", default=300, show_default=True, metavar="N", help="How many texts the model writes.")
@click.option("--prompts", type=_FILE, help="What it writes from, a prompt a line; otherwise built-in instructions.")
@click.option("--max-new-tokens", default=96, show_default=True, metavar="N", help="Length of a text.")
@click.option("--depth", default=3, show_default=True, help="Residual blocks of the head.")
@click.option("--rejected", default=6.0, show_default=True, metavar="W", help="What a rejection weighs when learning.")
@click.option("--epochs", default=5.0, show_default=True, metavar="E", help="How often all tokens are learned from.")
@click.option("--seed", default=1, show_default=True, help="Decides texts and training.")
def acceptance(
    out: Path,
    draft: str,
    model: str,
    texts: int,
    prompts: Path | None,
    max_new_tokens: int,
    depth: int,
    rejected: float,
    epochs: float,
    seed: int,
) -> None:
    """Train a head that tells how likely MODEL accepts what the draft model drafts.

    It is used as --drafter draft-model:model=NAME,length=20 --budget specdec++:head=DIR. MODEL first writes the texts
    to learn from; take another seed than the draft was trained with. Where most drafts are rejected, --rejected 1 keeps
    the head from seeing none but rejections. Stop with Ctrl-C whenever you like: the same command goes on where it
    stopped.
    """
    import json
    import shlex
    import sys

    from ..model.load import load
    from ..model.named import named
    from ..model.store import terminal_progress
    from ..train.acceptance import AcceptanceRecipe, check_folder, check_texts, train_acceptance
    from ..train.data import read_prompts

    recipe = AcceptanceRecipe(depth=depth, rejected=rejected, epochs=epochs, seed=seed)
    check_texts(texts)
    check_folder(out)
    lines = read_prompts(prompts) if prompts else []
    target, drafting = load(model), named(draft)
    facts = {"model": target.name, "draft": draft, "command": shlex.join(["decodery", *sys.argv[1:]])}
    try:
        with terminal_progress(counts=True) as progress:
            corpus = own_texts(target, out / "text", texts, lines, max_new_tokens, seed, 0, progress)
            scores = train_acceptance(
                target.model, drafting, corpus, out, recipe=recipe, facts=facts, progress=progress
            )
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    click.echo(json.dumps(scores, indent=1))
    click.echo(f"the head is ready: --budget specdec++:head={out}")

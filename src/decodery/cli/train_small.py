"""The commands of `decodery train` whose result is small and belongs to one model: what it learns from its own text."""

from __future__ import annotations

from pathlib import Path

import click

from .own_texts import own_texts, prompts_for

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Train placeholders for --drafter lexical-unit.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model that is to write in units.")
@click.option("--texts", default=2000, show_default=True, metavar="N", help="How many texts the model writes.")
@click.option("--prompts", type=_FILE, help="What it writes from, a prompt a line; otherwise built-in instructions.")
@click.option("--max-new-tokens", default=160, show_default=True, metavar="N", help="Length of a text.")
@click.option("--span", default=4, show_default=True, help="Tokens of the longest unit.")
@click.option("--alpha", default=0.5, show_default=True, help="How sure the model is of the tokens that are learned.")
@click.option("--steps", default=300, show_default=True, help="Training steps, of one text each.")
@click.option("--lr", default=3e-2, show_default=True, help="Learning rate at its highest.")
@click.option("--seed", default=0, show_default=True, help="Decides texts and training.")
def units(
    out: Path,
    model: str,
    texts: int,
    prompts: Path | None,
    max_new_tokens: int,
    span: int,
    alpha: float,
    steps: int,
    lr: float,
    seed: int,
) -> None:
    """Train what MODEL reads in place of tokens not written yet: --drafter lexical-unit:units=DIR.

    Placeholders alone learn, never the model. MODEL first writes the texts to learn from; a folder of `decodery train
    draft` or `decodery train contexts` with the same settings has them already. Stop with Ctrl-C whenever you like: the
    same command goes on where it stopped.
    """
    import json
    import shlex
    import sys

    import torch

    from ..model.load import choose_dtype, load
    from ..model.store import terminal_progress
    from ..train.units import Recipe, check_folder, train_units

    recipe = Recipe(span=span, alpha=alpha, steps=steps, lr=lr, seed=seed)
    check_folder(out)
    lines = prompts_for(texts, prompts)
    loaded = load(model)
    try:
        with terminal_progress(counts=True) as progress:
            corpus = own_texts(loaded, out / "text" / "written", texts, lines, max_new_tokens, seed, 20, progress)
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            # Gradients need floating point; bfloat16 is faster where the processor computes in it.
            learning = load(model, dtype=choose_dtype("auto", "bfloat16", device)).model
            command = shlex.join(["decodery", *sys.argv[1:]])
            found, _ = train_units(loaded, learning, corpus, out, recipe=recipe, command=command, progress=progress)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The units are ready: --drafter lexical-unit:units={out}")


@click.command(short_help="Collect n-grams for suggestions.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose texts are counted.")
@click.option("--texts", default=2000, show_default=True, metavar="N", help="How many texts the model writes.")
@click.option("--prompts", type=_FILE, help="What it writes from, a prompt a line; otherwise built-in instructions.")
@click.option("--max-new-tokens", default=160, show_default=True, metavar="N", help="Length of a text.")
@click.option("--seed", default=0, show_default=True, help="Decides the texts.")
def ngrams(out: Path, model: str, texts: int, prompts: Path | None, max_new_tokens: int, seed: int) -> None:
    """Collect what follows what in MODEL's own texts, for lm.drafts(ngrams=load_ngrams(DIR/ngrams.safetensors)).

    A folder of `decodery train draft` with the same settings has the texts already. Texts of your own are counted by
    lm.ngrams(texts). Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from ..model.drafts import NGRAMS
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..suggest.ngrams import save_ngrams

    lines = prompts_for(texts, prompts)
    loaded = load(model)
    try:
        with terminal_progress(counts=True) as progress:
            corpus = own_texts(loaded, out / "text" / "written", texts, lines, max_new_tokens, seed, 20, progress)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    written = [text.tokens[text.written :] for text in corpus]
    facts = {"vocabulary": loaded.model.config.vocabulary, "corpus": corpus.facts}
    save_ngrams(out / NGRAMS, written, loaded.model.vocab_size, facts)
    click.echo(f"The n-grams of {sum(map(len, written)):,} tokens are ready: {out / NGRAMS}")

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
    from ..model.transformer import Transformer
    from ..train.units import UnitsRecipe, check_folder, train_units

    recipe = UnitsRecipe(span=span, alpha=alpha, steps=steps, lr=lr, seed=seed)
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
            assert isinstance(learning, Transformer)
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


@click.command(short_help="Train a second attention for --source partial-attention.")
@click.argument("pairs", type=_FILE)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model that is to look at its prompts.")
@click.option("--last", type=int, metavar="N", help="Only the last N layers get a second attention (all).")
@click.option("--reset/--no-reset", default=True, show_default=True, help="Count positions anew behind the prompt.")
@click.option("--echo", default=0.5, show_default=True, help="Weight of the prompt's auto-encoding.")
@click.option("--steps", default=200, show_default=True, help="Training steps.")
@click.option("--batch", default=4, show_default=True, help="Pairs per step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@click.option("--raw", is_flag=True, help="The sources are plain text, without the chat template.")
@click.option("--seed", default=0, show_default=True, help="Decides where training begins, and its order.")
def partial(
    pairs: Path,
    out: Path,
    model: str,
    last: int | None,
    reset: bool,
    echo: float,
    steps: int,
    batch: int,
    lr: float,
    raw: bool,
    seed: int,
) -> None:
    """Train a second attention that sees the prompt alone: --source partial-attention:weights=DIR/partial.safetensors.

    PAIRS holds one object a line: {"source": ..., "target": ...}, a prompt and what is to be written. The model stays
    as it is, and has to be loaded in floating point to be used so. One pair in ten is kept for validation. Stop with
    Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    import json
    import shlex
    import sys

    from .. import load
    from ..model.store import terminal_progress
    from ..train.partial import PARTIAL, fit_partial, read_pairs

    found = read_pairs(pairs)
    lm = load(model, dtype="float32")
    texts = [
        (lm.encode(source, raw=raw), [*lm.tokenizer.encode(target, special=False), *lm.tokenizer.eos_ids[:1]])
        for source, target in found
    ]
    try:
        with terminal_progress(counts=True) as progress:
            weights = fit_partial(
                lm.model,
                texts,
                out,
                steps=steps,
                last=last,
                reset=reset,
                echo=echo,
                batch=batch,
                lr=lr,
                seed=seed,
                facts={"model": lm.name, "command": shlex.join(["decodery", *sys.argv[1:]])},
                progress=progress,
            )
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from what is in {out}", err=True)
        raise
    click.echo(json.dumps(weights.facts["validation"], indent=1))
    click.echo(f"The second attention is ready: --source partial-attention:weights={out / PARTIAL}")

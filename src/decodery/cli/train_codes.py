"""`decodery train sae`, `codebook` and `keys`: what is read off heads, sublayers and states as codes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import click

from .command import command, option
from .options import together
from .train_common import FILE, command_line, model_option, out_option, pieces, seed_option, texts_options, told

_RATE = option("--rate", default=0.1, show_default=True, help="Of what is harmless, flagged at most.")


@command(example="train sae --out codes")
@click.argument("examples", required=False, type=FILE)
@together(out_option, model_option("whose heads are read"), _RATE, seed_option("examples and training"))
@option("--count", default=120, show_default=True, type=click.IntRange(4), help="Built-in examples.")
@option("--chat", is_flag=True, help="Examples are what a user says, by the chat template, and not plain texts.")
@option("--max-new-tokens", default=24, show_default=True, type=click.IntRange(1), help="Written from each.")
@option("--features", default=200, show_default=True, type=click.IntRange(2), help="Of the autoencoder.")
@option("--sparsity", default=0.02, show_default=True, help="Weight of the features' mean.")
@option("--top", default=10, show_default=True, type=click.IntRange(1), help="Heads that will be watched.")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
def sae(
    examples: Path | None,
    out: Path,
    model: str,
    rate: float,
    seed: int,
    count: int,
    chat: bool,
    max_new_tokens: int,
    features: int,
    sparsity: float,
    top: int,
    steps: int,
) -> None:
    """Find which attention heads of MODEL take part in a behaviour, by what they write at the end of EXAMPLES.

    EXAMPLES holds one object a line, {"prompt": text, "positive": true, "group": text}: prompts after which the
    behaviour completes, and others of the same form after which it cannot. A fifth is tested on, by group; half of the
    others are learned from, and the threshold is set on what MODEL writes from the rest. Without a file: who is given
    something, in sentences of two names.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.sae import CODES
    from decodery.training.head_texts import evaluated, written
    from decodery.training.sae import built_in_examples, read_examples, train_sae

    found = built_in_examples(count, seed) if examples is None else read_examples(examples)
    lm = load(model)
    with terminal_progress(counts=True) as progress:
        read = written(lm, found, chat=chat, max_new_tokens=max_new_tokens, progress=progress)
    learn = functools.partial(
        train_sae,
        heads=lm.model.config.num_heads,
        model=lm.model.fingerprint,
        rate=rate,
        top=top,
        features=features,
        sparsity=sparsity,
        steps=steps,
        seed=seed,
        data=str(examples or "built-in sentences"),
        chat=chat,
        tokens=max_new_tokens,
        facts={"model": lm.name, "command": command_line()},
    )
    trained, report = evaluated(read, learn, top, seed)
    replace(trained, facts={**trained.facts, "report": report}).save(out / CODES)
    told(report, trained.threshold)
    click.echo(f"The head codes are ready: --monitor sae:codes={out},top={top}")


@command(example="train codebook notes.txt --out codebooks")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(out_option, model_option("whose states get codes"), texts_options, seed_option("order and beginning"))
@option("--site", "sites", multiple=True, help="head_out.L, attn_out.L or mlp_out.L (mlp_out at half); repeated.")
@option("--codes", default=1000, show_default=True, type=click.IntRange(2), help="Codes of a group.")
@option("--k", default=8, show_default=True, type=click.IntRange(1), help="Codes that a row has.")
@option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--batch", default=4, show_default=True, type=click.IntRange(1), help="Pieces per step.")
@option("--lr", default=5e-4, show_default=True, help="Learning rate.")
def codebook(
    files: tuple[Path, ...],
    out: Path,
    model: str,
    texts: int,
    length: int,
    seed: int,
    sites: tuple[str, ...],
    codes: int,
    k: int,
    steps: int,
    batch: int,
    lr: float,
) -> None:
    """Train codebooks for MODEL's states from text FILES: what a state is replaced by is the mean of its nearest codes.

    The codes learn from what the model then predicts and from how near they come; the model stays as it is.
    """
    import torch

    from decodery.core.errors import SettingsError
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.codebook import CODEBOOKS
    from decodery.training.codebook import reading, train_codebook

    if k > codes:
        raise SettingsError(f"a row cannot have {k} of {codes} codes: give fewer with --k")
    loaded = load(model, dtype="float32")
    sites = sites or (f"mlp_out.{loaded.model.config.num_layers // 2}",)
    found = pieces(loaded, files, texts, length)
    held, learned = found[::5], [each for number, each in enumerate(found) if number % 5]
    if len(held) < 2:
        raise SettingsError(
            f"the files hold {len(found)} pieces of {length} tokens, and one in five is held out: give 6, or a "
            "smaller --length"
        )
    with terminal_progress(counts=True) as progress:
        facts = {"model": loaded.name, "command": command_line()}
        trained = train_codebook(
            loaded.model,
            reading(learned, batch),
            sites,
            codes=codes,
            k=k,
            steps=steps,
            lr=lr,
            held=torch.tensor(held, dtype=torch.int64, device="cpu"),
            seed=seed,
            facts=facts,
            progress=progress,
        )
    trained.save(out / CODEBOOKS)
    told(trained.facts["report"], sites=list(trained.sites), k=k)
    click.echo(f"The codebooks are ready: --monitor codebook:codebooks={out},action=switch")


@command(example="train kv-bottleneck notes.txt --out keys")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(out_option, model_option("whose states find keys"), texts_options, seed_option("projections and beginning"))
@option("--codebooks", default=16, show_default=True, type=click.IntRange(1), help="Each gives a state one key.")
@option("--keys", "count", default=512, show_default=True, type=click.IntRange(1), help="Keys of a codebook.")
@option("--rank", default=64, show_default=True, type=click.IntRange(1), help="Numbers of a value.")
def kv_bottleneck(
    files: tuple[Path, ...],
    out: Path,
    model: str,
    texts: int,
    length: int,
    seed: int,
    codebooks: int,
    count: int,
    rank: int,
) -> None:
    """Find keys where MODEL's states are on text FILES, which need no labels, and freeze them.

    What the drafter learns while it drafts are the values after them; it begins with none.
    """
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.speculative.stores.bottleneck import FILE as KEYS
    from decodery.training.kv_bottleneck import KeyRecipe, learn_keys

    recipe = KeyRecipe(codebooks=codebooks, keys=count, rank=rank, seed=seed)
    loaded = load(model)
    with terminal_progress(counts=True) as progress:
        facts = {"model": loaded.name, "command": command_line()}
        found = learn_keys(
            loaded.model, pieces(loaded, files, texts, length), recipe=recipe, facts=facts,
            progress=progress,
        )  # fmt: skip
    found.save(out / KEYS)
    click.echo(f"keys of {found.facts['tokens']:,} states are ready: --drafter discrete-key-value:keys={out}")

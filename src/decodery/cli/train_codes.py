"""`decodery train sae`, `codebook` and `keys`: what is read off heads, sublayers and states as codes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .options import together
from .training import FILE, command_line, model_option, out_option, pieces, seed_option, texts_options

_RATE = click.option("--rate", default=0.1, show_default=True, help="Of what is harmless, flagged at most.")


@click.command(short_help="Find the heads of a behaviour for --monitor sae:codes=DIR.")
@click.argument("examples", required=False, type=FILE)
@together(out_option, model_option("whose heads are read"), _RATE, seed_option("examples and training"))
@click.option("--count", default=60, show_default=True, type=click.IntRange(4), help="Built-in examples.")
@click.option("--features", default=200, show_default=True, type=click.IntRange(2), help="Of the autoencoder.")
@click.option("--sparsity", default=0.02, show_default=True, help="Weight of the features' mean.")
@click.option("--top", default=10, show_default=True, type=click.IntRange(1), help="Heads that will be watched.")
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
def sae(
    examples: Path | None,
    out: Path,
    model: str,
    rate: float,
    seed: int,
    count: int,
    features: int,
    sparsity: float,
    top: int,
    steps: int,
) -> None:
    """Find which attention heads of MODEL take part in a behaviour, by what they write at the end of EXAMPLES.

    EXAMPLES holds one object a line, {"prompt": text, "positive": true}: prompts behind which the behaviour completes,
    and others of the same form behind which it cannot. Half of them are learned from, and the threshold is set on the
    rest. Without a file: who is given something, in sentences of two names.
    """
    from .. import load
    from ..model.store import terminal_progress
    from ..monitor.sae import CODES
    from ..train.sae import built_in_examples, head_rows, read_examples, train_sae

    found = built_in_examples(count, seed) if examples is None else read_examples(examples)
    lm = load(model)
    with terminal_progress(counts=True) as progress:
        rows = head_rows(lm, [each.prompt for each in found], progress)
    trained = train_sae(
        rows,
        [each.positive for each in found],
        heads=lm.model.config.num_heads,
        model=lm.model.fingerprint,
        rate=rate,
        top=top,
        features=features,
        sparsity=sparsity,
        steps=steps,
        seed=seed,
        data=str(examples or "built-in sentences"),
        facts={"model": lm.name, "command": command_line()},
    )
    trained.save(out / CODES)
    click.echo(json.dumps(dict(trained.facts) | {"threshold": trained.threshold.facts()}, indent=1))
    click.echo(f"The head codes are ready: --monitor sae:codes={out},top={top}")


@click.command(short_help="Train codes in the place of states for --monitor codebook.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(out_option, model_option("whose states get codes"), texts_options, seed_option("order and beginning"))
@click.option("--site", "sites", multiple=True, help="head_out.L, attn_out.L or mlp_out.L (mlp_out at half); repeated.")
@click.option("--codes", default=1000, show_default=True, type=click.IntRange(2), help="Codes of a group.")
@click.option("--k", default=8, show_default=True, type=click.IntRange(1), help="Codes that a row has.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=4, show_default=True, type=click.IntRange(1), help="Pieces per step.")
@click.option("--lr", default=5e-4, show_default=True, help="Learning rate.")
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
    from ..errors import SettingsError
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..monitor.codebook import CODEBOOKS
    from ..train.codebook import reading, train_codebook

    if k > codes:
        raise SettingsError(f"a row cannot have {k} of {codes} codes: give fewer with --k")
    loaded = load(model, dtype="float32")
    sites = sites or (f"mlp_out.{loaded.model.config.num_layers // 2}",)
    draw = reading(pieces(loaded, files, texts, length), batch)
    with terminal_progress(counts=True) as progress:
        facts = {"model": loaded.name, "command": command_line()}
        trained = train_codebook(
            loaded.model, draw, sites, codes=codes, k=k, steps=steps, lr=lr, seed=seed, facts=facts, progress=progress
        )
    trained.save(out / CODEBOOKS)
    click.echo(json.dumps(dict(trained.facts) | {"sites": list(trained.sites), "k": k}, indent=1))
    click.echo(f"The codebooks are ready: --monitor codebook:codebooks={out},action=switch")


@click.command(short_help="Freeze keys for --drafter discrete-key-value:keys=DIR.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(out_option, model_option("whose states find keys"), texts_options, seed_option("projections and beginning"))
@click.option("--codebooks", default=16, show_default=True, type=click.IntRange(1), help="Each gives a state one key.")
@click.option("--keys", "count", default=512, show_default=True, type=click.IntRange(1), help="Keys of a codebook.")
@click.option("--rank", default=64, show_default=True, type=click.IntRange(1), help="Numbers of a value.")
def keys(
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

    What the drafter learns while it drafts are the values behind them; it begins with none.
    """
    from ..draft.stores.bottleneck import FILE as KEYS
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.keys import KeyRecipe, learn_keys

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

"""`decodery train sae`, `codebook`, `autoencoder` and `kv-bottleneck`: codes of hidden states."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .command import command, option
from .options import together
from .train_common import (
    FILE,
    command_line,
    model_option,
    out_option,
    pieces,
    print_report,
    resumable,
    seed_option,
    texts_options,
)

_RATE = option("--rate", default=0.1, show_default=True, help="Maximum rate of false alarms.")


@command(example="train sae --out codes")
@click.argument("examples", required=False, type=FILE)
@together(out_option, model_option("whose heads are read"), _RATE, seed_option("examples and training"))
@option("--count", default=120, show_default=True, type=click.IntRange(4), help="Number of built-in examples.")
@option("--chat", is_flag=True, help="Apply the chat template to the examples.")
@option(
    "--max-new-tokens",
    default=24,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens that the model writes after an example.",
)
@option("--features", default=200, show_default=True, type=click.IntRange(2), help="Features of the autoencoder.")
@option("--sparsity", default=0.02, show_default=True, help="Weight of the sparsity loss, the mean of the features.")
@option("--top", default=10, show_default=True, type=click.IntRange(1), help="Number of heads to watch.")
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
    """Find the attention heads of MODEL that take part in a behaviour, for the monitor sae.

    EXAMPLES holds one JSON object a line, {"prompt": text, "positive": true, "group": text}: prompts after which the
    behaviour occurs, and similar prompts after which it cannot. A fifth is the test set, by group. Half of the rest is
    for training, half sets the threshold. The default is built-in sentences about who is given something. Or it holds
    your own texts with labels, {"messages": [...], "label": true or false, "group": text}.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.sae import HeadCodes
    from decodery.training.head_texts import evaluated, read_answers, written
    from decodery.training.labelled import is_labelled, read_chats
    from decodery.training.sae import built_in_examples, read_examples, train_sae

    chats = read_chats(examples) if examples is not None and is_labelled(examples) else []
    found = built_in_examples(count, seed) if examples is None else [] if chats else read_examples(examples)
    lm = load(model)
    with terminal_progress(counts=True) as progress:
        if chats:
            read = read_answers(lm, chats, progress)
            chat, max_new_tokens = True, max(len(each.rows) for each in read)
        else:
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
    replace(trained, facts={**trained.facts, "report": report}).save(out / HeadCodes.FILE)
    print_report(report, trained.threshold)
    click.echo(f"The head codes are ready: --monitor sae:codes={out},top={top}")


@command(example="train codebook notes.txt --out codebooks")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(
    out_option, model_option("whose hidden states get codes"), texts_options, seed_option("order and initial weights")
)
@option(
    "--site",
    "sites",
    multiple=True,
    show_default="mlp_out of the middle layer",
    help="Hook point: head_out.L, attn_out.L or mlp_out.L of layer L. Repeatable.",
)
@option("--codes", default=1000, show_default=True, type=click.IntRange(2), help="Codes of a codebook.")
@option("--k", default=8, show_default=True, type=click.IntRange(1), help="Codes of a row.")
@option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--batch", default=4, show_default=True, type=click.IntRange(1), help="Batch size in text pieces.")
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
    """Train codebooks of the hidden states of MODEL on text FILES, for the monitor codebook.

    A state is replaced by the mean of its nearest codes. The codes are trained on the predictions of MODEL and on their
    distance to the states. MODEL does not change.
    """
    import torch

    from decodery.core.errors import SettingsError
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.codebook import Codebooks
    from decodery.training.codebook import reading, train_codebook

    if k > codes:
        raise SettingsError(f"--k {k} is more than --codes {codes}: give a smaller --k")
    loaded = load(model, dtype="float32")
    sites = sites or (f"mlp_out.{loaded.model.config.num_layers // 2}",)
    found = pieces(loaded, files, texts, length, needed=6)
    held, learned = found[::5], [each for number, each in enumerate(found) if number % 5]
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
    trained.save(out / Codebooks.FILE)
    print_report(trained.facts["report"], sites=list(trained.sites), k=k)
    click.echo(f"The codebooks are ready: --monitor codebook:codebooks={out},action=switch")


@command(example="train autoencoder notes.txt --site resid_post.15 --out sae")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(out_option, model_option("whose hidden states are read"), texts_options, seed_option("order and weights"))
@option("--site", show_default="resid_post of the middle layer", help="Hook point, such as resid_post.10.")
@option("--features", default=2048, show_default=True, type=click.IntRange(2), help="Features of the autoencoder.")
@option("--k", default=32, show_default=True, type=click.IntRange(1), help="Active features of a row.")
@option("--steps", default=500, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--batch", default=256, show_default=True, type=click.IntRange(1), help="Hidden states of a step.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@option(
    "--measure",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Train nothing: measure the autoencoder of a folder of SAELens or sparsify.",
)
def autoencoder(
    files: tuple[Path, ...],
    out: Path,
    model: str,
    texts: int,
    length: int,
    seed: int,
    site: str | None,
    measure: Path | None,
    **settings: Any,
) -> None:
    """Train a sparse autoencoder of the hidden states of MODEL on text FILES, for the monitor feature.

    At most --k features of a state are active. A fifth of the text pieces is held out; the printed figures are theirs:
    active features, variance that the reconstruction leaves, features that never are active. The folder is one that
    SAELens reads. An interrupted run continues.
    """
    ctx = click.get_current_context()
    unused = [f"--{name}" for name in settings if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if measure is not None and unused:
        raise click.UsageError(f"--measure trains nothing: leave out {' and '.join(unused)}")
    import torch

    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import write_text
    from decodery.monitors.feature import Feature
    from decodery.monitors.sparse_autoencoder import SparseAutoencoder
    from decodery.training.autoencoder import measured, rows_of_texts, train_autoencoder

    loaded = load(model)
    # Two texts are tested at least: one alone has no interval. A fifth is held out, and half of that chooses.
    found = pieces(loaded, files, texts, length, needed=16 if measure is None else 6)
    known = None if measure is None else SparseAutoencoder.load(measure, site or "")
    if known is not None:
        Feature(known, (0,)).fits(loaded.model)
    place = known.site if known is not None else site or f"resid_post.{loaded.model.config.num_layers // 2}"
    with resumable(out) as progress:
        rows = rows_of_texts(loaded.model, found, place, progress)
        held, learned = rows[::5], torch.cat([each for number, each in enumerate(rows) if number % 5])
        chosen, tested = torch.cat(held[::2]), held[1::2]
        if known is None:
            known = train_autoencoder(learned, chosen, out, place, seed=seed, progress=progress, **settings)
            known.save(out)
        else:
            tested = held
    report = measured(known, tested, seed)
    facts = {"model": loaded.name, "command": command_line(), "site": place, "report": report}
    write_text(out / "report.json", json.dumps(facts, indent=1))
    print_report(report, site=place)
    click.echo(f"The autoencoder is ready: --monitor feature:sae={measure or out},features=0")


@command(example="train kv-bottleneck notes.txt --out keys")
@click.argument("files", nargs=-1, required=True, type=FILE)
@together(
    out_option, model_option("whose hidden states are read"), texts_options, seed_option("projections and initial keys")
)
@option(
    "--codebooks",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Number of codebooks. Each gives a hidden state one key.",
)
@option("--keys", "count", default=512, show_default=True, type=click.IntRange(1), help="Keys of a codebook.")
@option("--rank", default=64, show_default=True, type=click.IntRange(1), help="Dimension of a value.")
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
    """Fit keys to the hidden states of MODEL on text FILES, for --drafter discrete-key-value:keys=DIR.

    The texts need no labels. The keys stay fixed: the drafter learns their values while it drafts, and starts with
    none.
    """
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.speculative.stores.bottleneck import KeySet
    from decodery.training.kv_bottleneck import KeyRecipe, learn_keys

    recipe = KeyRecipe(codebooks=codebooks, keys=count, rank=rank, seed=seed)
    loaded = load(model)
    with terminal_progress(counts=True) as progress:
        facts = {"model": loaded.name, "command": command_line()}
        found = learn_keys(
            loaded.model, pieces(loaded, files, texts, length), recipe=recipe, facts=facts,
            progress=progress,
        )  # fmt: skip
    found.save(out / KeySet.FILE)
    click.echo(f"keys of {found.facts['tokens']:,} states are ready: --drafter discrete-key-value:keys={out}")

"""`decodery train sven` and `partial`: what logits sources learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .command import command, option
from .train_common import FILE, command_line, learning_dtype, model_option, out_option, resumable, seed_option


@command(example="train sven --out prefixes")
@click.argument("pairs", required=False, type=FILE)
@out_option
@model_option("that is to be steered")
@option("--length", default=5, show_default=True, help="Positions of a prefix.")
@option("--epochs", default=4.0, show_default=True, metavar="E", help="How often all pairs are learned from.")
@option("--lr", default=1e-2, show_default=True, help="Learning rate of the first step.")
@seed_option("the order and what is left out")
def sven(pairs: Path | None, out: Path, model: str, length: int, epochs: float, lr: float, seed: int) -> None:
    """Train two short prefixes that turn MODEL towards programs as they are after a fix, or before it.

    PAIRS holds one object a line: {"before": ..., "after": ...}, the same program before and after. Without it, 100
    built-in pairs about security are used. Only the prefixes learn, never the model; one pair in ten is kept for
    validation. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.training.fixes import built_in_pairs
    from decodery.training.programs import read_pairs
    from decodery.training.sven import CONTROLS, SVENRecipe, check_folder, train_sven

    recipe = SVENRecipe(length=length, epochs=epochs, lr=lr, seed=seed)
    check_folder(out)
    given = read_pairs(pairs) if pairs else built_in_pairs(100)
    loaded = load(model, dtype=learning_dtype())
    with resumable(out) as progress:
        found, _ = train_sven(loaded, given, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The prefixes are ready: --source sven:control={CONTROLS[0]},prefix={out}")


@command(example="train partial pairs.jsonl --out partial")
@click.argument("pairs", type=FILE)
@out_option
@model_option("that is to look at its prompts")
@option("--last", type=int, metavar="N", help="Only the last N layers get a second attention (all).")
@option("--reset/--no-reset", default=True, show_default=True, help="Count positions anew behind the prompt.")
@option("--echo", default=0.5, show_default=True, help="Weight of the prompt's auto-encoding.")
@option("--steps", default=200, show_default=True, help="Training steps.")
@option("--batch", default=4, show_default=True, help="Pairs per step.")
@option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@option("--raw", is_flag=True, help="The sources are plain text, without the chat template.")
@seed_option("where training begins, and its order")
def partial(pairs: Path, out: Path, model: str, raw: bool, **settings: Any) -> None:
    """Train a second attention that sees the prompt alone: --source partial-attention:weights=DIR/partial.safetensors.

    PAIRS holds one object a line: {"source": ..., "target": ...}, a prompt and what is to be written. The model stays
    as it is, and has to be loaded in floating point to be used so. One pair in ten is kept for validation. Stop with
    Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery import load
    from decodery.training.partial import PARTIAL, fit_partial, read_pairs

    found = read_pairs(pairs)
    lm = load(model, dtype="float32")
    texts = [
        (lm.encode(source, raw=raw), [*lm.tokenizer.encode(target, special=False), *lm.tokenizer.eos_ids[:1]])
        for source, target in found
    ]
    facts = {"model": lm.name, "command": command_line()}
    with resumable(out) as progress:
        weights = fit_partial(lm.model, texts, out, facts=facts, progress=progress, **settings)
    click.echo(json.dumps(weights.facts["validation"], indent=1))
    click.echo(f"The second attention is ready: --source partial-attention:weights={out / PARTIAL}")

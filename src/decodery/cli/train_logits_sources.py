"""`decodery train sven` and `partial`: what logits sources learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .command import command, option
from .options import chat_template_option
from .train_common import FILE, command_line, learning_dtype, model_option, out_option, resumable, seed_option


@command(example="train sven --out prefixes")
@click.argument("pairs", required=False, type=FILE)
@out_option
@model_option("to steer")
@option("--length", default=5, show_default=True, help="Positions of a prefix.")
@option("--epochs", default=4.0, show_default=True, metavar="E", help="Training epochs.")
@option("--lr", default=1e-2, show_default=True, help="Initial learning rate.")
@seed_option("the order and the split")
def sven(pairs: Path | None, out: Path, model: str, length: int, epochs: float, lr: float, seed: int) -> None:
    """Train two short prefixes that steer MODEL towards programs after a fix, or before it.

    PAIRS holds one JSON object a line, {"before": ..., "after": ...}: the same program before and after a fix. The
    default is 100 built-in pairs about security. Only the prefixes are trained. One pair in ten is held out. Interrupt
    it with Ctrl-C: the same command continues.
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
    click.echo(f"The prefixes are ready: --logits-source sven:control={CONTROLS[0]},prefix={out}")


@command(example="train partial pairs.jsonl --out partial")
@click.argument("pairs", type=FILE)
@out_option
@model_option("to train for")
@option("--last", type=int, metavar="N", show_default="all", help="Add the second attention to the last N layers only.")
@option("--reset/--no-reset", default=True, show_default=True, help="Restart positions after the prompt.")
@option("--echo", default=0.5, show_default=True, help="Weight of the auto-encoding loss of the prompt.")
@option("--steps", default=200, show_default=True, help="Training steps.")
@option("--batch", default=4, show_default=True, help="Batch size in pairs.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@chat_template_option("The sources are plain text, without the chat template.")
@seed_option("the initial weights and the order")
def partial(pairs: Path, out: Path, model: str, apply_chat_template: bool, **settings: Any) -> None:
    """Train a second attention that reads the prompt alone, for the source partial-attention.

    PAIRS holds one JSON object a line: {"source": ..., "target": ...}. The model does not change; load it in floating
    point to use the attention. One pair in ten is held out. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery import load
    from decodery.training.partial import PARTIAL, fit_partial, read_pairs

    found = read_pairs(pairs)
    lm = load(model, dtype="float32")
    texts = [
        (
            lm.encode(source, apply_chat_template=apply_chat_template),
            [*lm.tokenizer.encode(target, special=False), *lm.tokenizer.eos_ids[:1]],
        )
        for source, target in found
    ]
    facts = {"model": lm.name, "command": command_line()}
    with resumable(out) as progress:
        weights = fit_partial(lm.model, texts, out, facts=facts, progress=progress, **settings)
    click.echo(json.dumps(weights.facts["validation"], indent=1))
    click.echo(f"The second attention is ready: --logits-source partial-attention:weights={out / PARTIAL}")

"""`decodery train learn2pd`: a small filter, of how a diffusion model decodes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .options import OUT_FILE, chat_template_option
from .train_common import FILE, model_option, seed_option


@command(example="train learn2pd prompts.txt -m diffusion --out filter.safetensors")
@click.argument("prompts", type=FILE)
@option("--out", required=True, type=OUT_FILE, help="Output file.")
@model_option("whose decoding is learned from")
@option("--dtype", default="auto", show_default=True, help="Precision of the weights.")
@option("--block", default=32, show_default=True, type=click.IntRange(1), help="Positions of a block.")
@option("--max-new-tokens", default=256, show_default=True, help="Positions of a canvas.")
@option("--epochs", default=3000, show_default=True, type=click.IntRange(1), help="Training epochs, full batch.")
@chat_template_option("The prompts are plain text, without the chat template.")
@seed_option("the initial weights")
def learn2pd(
    prompts: Path,
    out: Path,
    model: str,
    dtype: str,
    block: int,
    max_new_tokens: int,
    epochs: int,
    apply_chat_template: bool,
    seed: int,
) -> None:
    """Train a filter that predicts which proposals of MODEL are final, for --diffuse learn2pd:filter=FILE.

    MODEL fills a canvas after each line of PROMPTS, one token a pass. Then it fills it again and writes every proposal
    that is final. Of ten prompts one selects the filter and one evaluates it. auc and plain_auc rate the filter and the
    plain confidence; least_passes is the share of passes that a perfect filter needs.
    """
    from dataclasses import replace

    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.data import read_prompts
    from decodery.training.learn2pd import fit_filter, labelled

    lines, lm = read_prompts(prompts), load(model, dtype=dtype)
    encoded = [lm.encode(line, apply_chat_template=apply_chat_template) for line in lines]
    with terminal_progress(counts=True) as progress:
        found = labelled(
            lm.engine(), lm.model, encoded, max_new_tokens, block, eos_ids=lm.tokenizer.eos_ids, progress=progress
        )
    learned, figures = fit_filter(found, model=lm.model.fingerprint, epochs=epochs, seed=seed)
    replace(learned, facts={"prompts": len(lines), "places": block, "epochs": epochs}).save(out)
    shown = {name: round(value, 4) for name, value in figures.items()}
    shown["least_passes"] = round(found.passes / found.static, 4)
    click.echo(json.dumps({"blocks": len(found.prompt), **shown}, indent=1))
    click.echo(f"The filter is ready: --diffuse learn2pd:filter={out},block={block}")

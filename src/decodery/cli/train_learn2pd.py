"""`decodery train learn2pd`: a small filter, of how a diffusion model decodes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .options import OUT_FILE
from .train_common import FILE, model_option, seed_option


@command(example="train learn2pd prompts.txt -m diffusion --out filter.safetensors")
@click.argument("prompts", type=FILE)
@option("--out", required=True, type=OUT_FILE, help="The file to write.")
@model_option("whose decoding is learned from")
@option("--dtype", default="auto", show_default=True, help="Precision of its weights.")
@option("--block", default=32, show_default=True, type=click.IntRange(1), help="Places of a block.")
@option("--max-new-tokens", default=256, show_default=True, help="Places of a canvas.")
@option("--epochs", default=3000, show_default=True, type=click.IntRange(1), help="Of training, full batch.")
@option("--raw", is_flag=True, help="The prompts are plain text, without the chat template.")
@seed_option("where the filter begins")
def learn2pd(
    prompts: Path, out: Path, model: str, dtype: str, block: int, max_new_tokens: int, epochs: int, raw: bool, seed: int
) -> None:
    """Train a filter that tells which proposals of MODEL are what it writes in the end.

    MODEL fills a canvas after each of PROMPTS, one a line, one token a pass; then again, writing at once whatever it
    proposes of that. Of ten prompts one is kept to choose the filter and one to judge it: auc and plain_auc say how
    well the filter and the bare confidence rank, least_passes what share of the passes a perfect filter would take.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.data import read_prompts
    from decodery.training.learn2pd import fit_filter, labelled

    lines, lm = read_prompts(prompts), load(model, dtype=dtype)
    encoded = [lm.encode(line, raw=raw) for line in lines]
    with terminal_progress(counts=True) as progress:
        found = labelled(
            lm.engine(), lm.model, encoded, max_new_tokens, block, eos_ids=lm.tokenizer.eos_ids, progress=progress
        )
    learned, figures = fit_filter(found, model=lm.model.fingerprint, epochs=epochs, seed=seed)
    learned.save(out, prompts=len(lines), places=block, epochs=epochs)
    shown = {name: round(value, 4) for name, value in figures.items()}
    shown["least_passes"] = round(found.passes / found.static, 4)
    click.echo(json.dumps({"blocks": len(found.prompt), **shown}, indent=1))
    click.echo(f"The filter is ready: --diffuse learn2pd:filter={out},block={block}")

"""`decodery train cppd`: slots that draft short texts at once, for models of an encoder and a decoder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .train_common import FILE, command_line, out_option, resumable, seed_option


@command(example="train cppd sources.txt -m t5-model --out slots")
@click.argument("sources", type=FILE)
@option("-m", "--model", required=True, help="The encoder-decoder model to draft for.")
@out_option
@option("--texts", default=8000, show_default=True, type=click.IntRange(1), help="Maximum number of sources.")
@option("--steps", default=3000, show_default=True, help="Maximum number of training steps.")
@option("--batch", default=32, show_default=True, help="Batch size in texts.")
@option("--lr", default=3e-3, show_default=True, help="Peak learning rate.")
@option("--longest", default=25, show_default=True, help="Maximum number of drafted tokens of a text.")
@option("--aside", default=1.0, show_default=True, help="Weight of the counting and ordering losses.")
@seed_option("weights and the order of texts")
def cppd(
    sources: Path, model: str, out: Path, texts: int, steps: int, batch: int, lr: float, longest: int, aside: float,
    seed: int,
) -> None:  # fmt: skip
    """Train slots that draft what MODEL writes for short sources: --drafter cppd:slots=DIR.

    SOURCES is a file with one source a line. MODEL first writes the text of each source, and does not change. One
    source in nine is held out. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.llm.llm import LLM
    from decodery.models.loaders.load import load
    from decodery.training.cppd import CPPDRecipe, check_folder, train_cppd
    from decodery.training.lines import read_lines

    recipe = CPPDRecipe(longest=longest, aside=aside, steps=steps, batch=batch, lr=lr, seed=seed)
    check_folder(out)
    target = load(model, dtype="float32")
    encoded = [LLM(target).encode(line) for line in dict.fromkeys(read_lines(sources)[:texts])]
    with resumable(out) as progress:
        found = train_cppd(target, encoded, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The slots are ready: --drafter cppd:slots={out}")

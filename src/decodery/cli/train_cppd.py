"""`decodery train cppd`: slots that draft short texts at once, for models of an encoder and a decoder."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import click

from .command import command, option
from .train_common import command_line, out_option, resumable, seed_option


@command(example="train cppd reorder -m reorder-model --out slots")
@click.argument("sources")
@option("-m", "--model", required=True, help="The model of an encoder and a decoder that they draft for.")
@out_option
@option("--texts", default=8000, show_default=True, type=click.IntRange(1), help="Sources at most.")
@option("--steps", default=3000, show_default=True, help="Training steps at most.")
@option("--batch", default=32, show_default=True, help="Texts in a step.")
@option("--lr", default=3e-3, show_default=True, help="Learning rate at its highest.")
@option("--longest", default=25, show_default=True, help="Tokens of a text that are drafted, at most.")
@option("--aside", default=1.0, show_default=True, help="What counting and ordering weigh beside the tokens.")
@seed_option("weights and the order of texts")
def cppd(
    sources: str, model: str, out: Path, texts: int, steps: int, batch: int, lr: float, longest: int, aside: float,
    seed: int,
) -> None:  # fmt: skip
    """Train slots that draft what MODEL writes of short sources: --drafter cppd:slots=DIR.

    SOURCES is a file with a source a line, or the name of a transduction, reorder or normalise, whose sources are made
    by code. The model writes its text of each first; it stays as it is. One source in nine is held out. Stop with
    Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.llm.llm import LLM
    from decodery.models.loaders.load import load
    from decodery.training import transductions
    from decodery.training.cppd import CPPDRecipe, check_folder, train_cppd
    from decodery.training.lines import read_lines

    recipe = CPPDRecipe(longest=longest, aside=aside, steps=steps, batch=batch, lr=lr, seed=seed)
    check_folder(out)
    file = Path(sources)
    if file.is_file():
        lines = read_lines(file)[:texts]
    else:
        kind = transductions.transduction(sources)
        lines = list(islice(transductions.sources(kind, "train"), texts))
    target = load(model, dtype="float32")
    encoded = [LLM(target).encode(line) for line in dict.fromkeys(lines)]
    with resumable(out) as progress:
        found = train_cppd(target, encoded, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The slots are ready: --drafter cppd:slots={out}")

"""The commands of `decodery train` for leaving a model early."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .train_common import (
    FILE,
    OwnTexts,
    command_line,
    learning_dtype,
    model_option,
    out_option,
    own_texts,
    resumable,
    seed_option,
)

_SOME = click.IntRange(1)


@command(example="train calm --delta 0.25 --out calibration")
@out_option
@model_option("to leave early")
@option("--texts", default=64, show_default=True, metavar="N", help="Number of texts to compare.")
@option("--prompts", type=FILE, show_default="built-in instructions", help="File of prompts, one a line.")
@option("--max-new-tokens", default=64, show_default=True, metavar="N", help="Maximum tokens of a text.")
@option("--confidence", default="state", show_default=True, type=click.Choice(["softmax", "state", "classifier"]))
@option("--every", default=5, show_default=True, help="Layers between two confidence checks.")
@option("--delta", default=0.25, show_default=True, help="Maximum mean loss (1 - ROUGE-L).")
@option("--epsilon", default=0.05, show_default=True, help="Maximum probability of a higher loss.")
@seed_option("the built-in prompts")
def calm(
    out: Path,
    model: str,
    texts: int,
    prompts: Path | None,
    max_new_tokens: int,
    confidence: str,
    every: int,
    delta: float,
    epsilon: float,
    seed: int,
) -> None:
    """Calibrate how confident MODEL must be to exit early, for the source calm.

    MODEL writes texts with all layers, then with decreasing thresholds. The last threshold whose mean loss is provably
    below the bound is kept. A classifier is first trained on as many texts of other prompts, the next lines of the
    file. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.llm.llm import LLM
    from decodery.models.loaders.load import load
    from decodery.training.calm import CalmRecipe, calibrate, check_folder
    from decodery.training.data import built_in_prompts, read_prompts

    recipe = CalmRecipe(confidence, every, max_new_tokens, delta, epsilon)  # type: ignore[arg-type]
    check_folder(out)
    count = 2 * texts if confidence == "classifier" else texts
    lines, loaded = read_prompts(prompts)[:count] if prompts else [], load(model)
    encode = LLM(loaded).encode
    asked = [encode(line) for line in lines] if lines else built_in_prompts(loaded, count, seed)
    with resumable(out) as progress:
        found = calibrate(
            loaded,
            asked[:texts],
            out,
            recipe=recipe,
            learned=asked[texts:],
            command=command_line(),
            progress=progress,
        )
    click.echo(json.dumps(found.tested.tolist()))
    click.echo(f"The calibration is ready: --logits-source calm:calibration={out}")


@command(example="train sec code.txt --out heads")
@click.argument("files", nargs=-1, required=True, type=FILE)
@out_option
@model_option("to leave early")
@option("--length", default=128, show_default=True, metavar="N", help="Tokens of a text piece.")
@option("--every", default=5, show_default=True, help="Layers between two checks.")
@option("--rank", default=16, show_default=True, help="Rank of the correction of the head at a check.")
@option("--epochs", default=2.0, show_default=True, metavar="E", help="Training epochs.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@seed_option("the initial weights and the order")
def sec(
    files: tuple[Path, ...],
    out: Path,
    model: str,
    length: int,
    every: int,
    rank: int,
    epochs: float,
    lr: float,
    seed: int,
) -> None:
    """Train checks that tell which layers of MODEL know the next token, for the source sec.

    FILES are texts like those that MODEL will write, such as programs. Corrections of the head and a classifier are
    trained; MODEL does not change. One text in ten is held out. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.training.data import cut_files
    from decodery.training.sec import SECRecipe, check_folder, train_sec

    recipe = SECRecipe(every=every, rank=rank, epochs=epochs, lr=lr, seed=seed)
    check_folder(out)
    loaded = load(model)
    with resumable(out) as progress:
        corpus = cut_files(
            files,
            out / "text",
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.model.vocab_size,
            length=length,
            progress=progress,
        )
        learning = load(model, dtype=learning_dtype()).model
        found = train_sec(loaded, learning, corpus, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The heads are ready: --logits-source sec:heads={out}")


@command("del", example="train del --exits 3 --out exits")
@out_option
@model_option("that drafts for itself")
@own_texts(count=48, length=64)
@option("--exits", default=3, show_default=True, type=_SOME, help="Number of exit layers.")
@option("--longest", default=18, show_default=True, type=_SOME, help="Maximum tokens of a draft.")
@option(
    "--head",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0.0),
    help="Cost of a head call, in layers. 0: as published.",
)
@seed_option("the texts")
def del_(out: Path, model: str, own: OwnTexts, exits: int, longest: int, head: float, seed: int) -> None:
    """Find the layers of MODEL that are the best exits for --drafter del.

    MODEL writes texts into DIR; a folder of such a command with the same settings has them already. Each layer is rated
    by how often it predicts the token of MODEL. The settings and their expected speed-up are printed. Interrupt it with
    Ctrl-C: the same command continues.
    """
    from dataclasses import asdict

    from decodery.core.errors import UnsupportedModel
    from decodery.models.loaders.load import load
    from decodery.models.protocol import is_open
    from decodery.training.dynamic_exit import find_exits

    lines, loaded = own.lines(), load(model)
    target = loaded.model
    if not is_open(target):
        raise UnsupportedModel(
            f"{loaded.name} does not show what its layers say: use a model that decodery runs itself"
        )
    with resumable(out) as progress:
        corpus = own.write(loaded, out / "text" / "written", lines, seed, progress, top=0)
        found = find_exits(target, list(corpus), exits=exits, longest=longest, head=head, progress=progress)
    click.echo(json.dumps(asdict(found), indent=1))
    if found.gain <= 1:
        click.echo("No exit is expected to be faster than plain decoding.")
    layers = "/".join(map(str, found.layers))
    click.echo(f"The exits are ready: --drafter del:layers={layers},length={found.length},head={head:g}")

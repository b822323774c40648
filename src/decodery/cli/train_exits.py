"""The commands of `decodery train` for leaving a model early."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .training import (
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


@click.command(short_help="Calibrate --logits-source calm:calibration=DIR.")
@out_option
@model_option("that is to be left early")
@click.option("--texts", default=64, show_default=True, metavar="N", help="How many texts are compared.")
@click.option("--prompts", type=FILE, help="Their prompts, one a line; otherwise built-in instructions.")
@click.option("--max-new-tokens", default=64, show_default=True, metavar="N", help="Length of a text.")
@click.option("--confidence", default="state", show_default=True, type=click.Choice(["softmax", "state", "classifier"]))
@click.option("--every", default=5, show_default=True, help="Layers between two looks at the confidence.")
@click.option("--delta", default=0.25, show_default=True, help="Largest mean loss, 1 minus ROUGE-L.")
@click.option("--epsilon", default=0.05, show_default=True, help="How likely it may be exceeded.")
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
    """Find how sure MODEL must be to leave early without its texts changing too much: --logits-source
    calm:calibration=DIR.

    MODEL writes texts with all of its layers, and again with thresholds from the strictest on, until one cannot be
    shown to keep their mean loss below the bound; the one before it is kept. A classifier first learns from as many
    texts after other prompts, the next lines of the file. Stop with Ctrl-C whenever you like: the same command goes on
    where it stopped.
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


@click.command(short_help="Train heads for --logits-source sec:heads=DIR.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@out_option
@model_option("that is to be left early")
@click.option("--length", default=128, show_default=True, metavar="N", help="Tokens of a text that files are cut into.")
@click.option("--every", default=5, show_default=True, help="Layers between two checks.")
@click.option("--rank", default=16, show_default=True, help="Rank of each check's correction of the head.")
@click.option("--epochs", default=2.0, show_default=True, metavar="E", help="How often corrections see all texts.")
@click.option("--lr", default=1e-3, show_default=True, help="Their learning rate at its highest.")
@seed_option("where training begins, and its order")
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
    """Train what tells, from text FILES, which layers of MODEL know the next token, and where none does.

    The files are such as MODEL is to write: programs, for example. Only corrections of the head and a classifier
    learn, never the model; one text in ten is held out. Stop with Ctrl-C whenever you like: the same command goes on
    where it stopped.
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


@click.command("del", short_help="Find exits for --drafter del:layers=...")
@out_option
@model_option("that is to draft for itself")
@own_texts(count=48, length=64)
@click.option("--exits", default=3, show_default=True, type=_SOME, help="How many layers it may choose from.")
@click.option("--longest", default=18, show_default=True, type=_SOME, help="Tokens of a draft at most.")
@click.option(
    "--head",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0.0),
    help="What a head call costs in layers; 0 as published.",
)
@seed_option("the texts")
def del_(out: Path, model: str, own: OwnTexts, exits: int, longest: int, head: float, seed: int) -> None:
    """Find which layers of MODEL promise most as exits for --drafter del.

    MODEL writes texts into DIR; a folder of another such command with the same settings has them already. They are read
    once, and it is counted how often each layer would have drafted what MODEL says. Prints the settings and what they
    promise. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
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
        click.echo("No layer promises more than plain decoding: drafting with this model's first layers does not pay.")
    layers = "/".join(map(str, found.layers))
    click.echo(f"The exits are ready: --drafter del:layers={layers},length={found.length},head={head:g}")

"""`decodery train`: make what some methods need."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(short_help="Make what some methods need.")
def train() -> None:
    """Make what some methods need, such as a datastore to draft from."""


@train.command(short_help="Index text files to draft from.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose tokens are indexed.")
def datastore(files: tuple[Path, ...], out: Path, model: str) -> None:
    """Index text FILES, each one document, into a folder for --drafter rest:datastore=DIR.

    Memory stays bounded however much text there is; an interrupted run is begun anew.
    """
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.datastore import build_datastore

    loaded = load(model)
    with terminal_progress() as progress:
        tokens = build_datastore(
            files, out, tokenizer=loaded.tokenizer, vocab_size=loaded.model.vocab_size, progress=progress
        )
    click.echo(f"{tokens:,} tokens are ready: {out}")


@train.command(short_help="Train a head for --rule judge:head=FILE.")
@click.argument("questions", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to make.")
@click.option("-m", "--model", default="smollm2", show_default=True, help="The model whose states are judged.")
@click.option("--max-new-tokens", default=96, show_default=True, help="Length of the model's own answers.")
@click.option("--places", default=12, show_default=True, help="Places of an answer where alternatives are tried.")
@click.option("--alternatives", default=2, show_default=True, help="Alternatives tried at a place.")
@click.option("--steps", default=600, show_default=True, help="Training steps.")
@click.option("--lr", default=1e-2, show_default=True, help="Learning rate.")
def judge(
    questions: Path, out: Path, model: str, max_new_tokens: int, places: int, alternatives: int, steps: int, lr: float
) -> None:
    """Train a head that tells which drafted tokens leave an answer right, for --rule judge:head=DIR/judge.safetensors.

    QUESTIONS holds one object a line: {"prompt": ..., "right": ..., "wrong": ...}, whose wrong answer parts from the
    right one where it goes wrong, or {"prompt": ...} with an answer that ends in a number: the model then answers,
    tries its own next best tokens where it is unsure, and sees whether the number stays. An interrupted run goes on
    where it stopped. One question in five is kept for validation.
    """
    import json
    import shlex
    import sys

    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.judge import JUDGE, Mining, examples, fit, read_questions

    asked, mining = read_questions(questions), Mining(max_new_tokens, places, alternatives)
    target = load(model)
    command = shlex.join(["decodery", *sys.argv[1:]])
    with terminal_progress() as progress:
        found = examples(target, asked, out, mining=mining, progress=progress)
        facts = {"model": target.name, "command": command}
        head, _ = fit(found, target.model.config.num_layers, out, steps=steps, lr=lr, facts=facts, progress=progress)
    click.echo(json.dumps(head.facts, indent=1))
    click.echo(f"The judge is ready: --rule judge:head={out / JUDGE}")

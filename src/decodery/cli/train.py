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

"""`decodery train datastore`: an index of text files to draft from."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .options import OUT_FOLDER
from .train_common import FILE, model_option


@command(example="train datastore notes.txt --out datastore")
@click.argument("files", nargs=-1, required=True, type=FILE)
@option("--out", required=True, type=OUT_FOLDER, help="The folder to make.")
@model_option("whose tokens are indexed")
def datastore(files: tuple[Path, ...], out: Path, model: str) -> None:
    """Index text FILES, each one document, into a folder for --drafter rest:datastore=DIR.

    Memory stays bounded however much text there is; an interrupted run is begun anew.
    """
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.datastore import build_datastore

    loaded = load(model)
    with terminal_progress() as progress:
        tokens = build_datastore(
            files, out, tokenizer=loaded.tokenizer, vocab_size=loaded.model.vocab_size, progress=progress
        )
    click.echo(f"{tokens:,} tokens are ready: {out}")

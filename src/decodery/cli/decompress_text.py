"""`decodery decompress-text`: a compressed text back."""

from __future__ import annotations

from pathlib import Path

import click

from decodery.core.errors import SettingsError

from .command import command, option
from .compress_text import ENDING, dtype_option, model_option, new_file, out_option, read_file
from .train_common import FILE


@command(example="decompress-text notes.txt.dcy --out again.txt")
@click.argument("file", type=FILE)
@out_option
@model_option
@dtype_option
@option("--drafter", metavar="SPEC", help="What drafts, such as prompt-lookup; it never changes the text.")
def decompress_text(file: Path, out: Path | None, model: str, dtype: str, drafter: str | None) -> None:
    """Write the text that `decodery compress-text` made FILE of; a damaged file is an error and never another text."""
    from decodery import load
    from decodery.extras.text_compression.text import decompress as decompressed
    from decodery.llm.resolve_settings import resolve_drafter
    from decodery.models.loaders.store import replacing, terminal_progress

    if out is None and file.suffix != ENDING:
        raise SettingsError(f"{file.name} does not end with {ENDING}: name the file to write with --out")
    target = new_file(out or file.with_suffix(""))
    chosen = None if drafter is None else resolve_drafter(drafter)
    with terminal_progress(counts=True) as progress:
        text = decompressed(load(model, dtype=dtype), read_file(file), drafter=chosen, progress=progress)
    with replacing(target) as temporary:
        temporary.write_bytes(text)
    click.echo(f"{len(text):,} bytes: {target}")

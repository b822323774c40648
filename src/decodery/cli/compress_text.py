"""`decodery compress-text`: a text as bits under a model's predictions."""

from __future__ import annotations

import os
from pathlib import Path

import click

from decodery.core.errors import SettingsError

from .command import command, option
from .options import OUT_FILE
from .train_common import FILE

ENDING = ".dcy"

out_option = option("--out", type=OUT_FILE, help="Output file.")
model_option = option("-m", "--model", default="smollm2", show_default=True, help="The model that predicts the bytes.")
dtype_option = option(
    "--dtype", type=click.Choice(["int8", "int4"]), default="int8", show_default=True, help="Precision of the weights."
)


@command(example="compress-text notes.txt")
@click.argument("file", type=FILE)
@out_option
@model_option
@dtype_option
def compress_text(file: Path, out: Path | None, model: str, dtype: str) -> None:
    """Compress FILE, any bytes, to FILE.dcy with the predictions of a model.

    `decodery decompress-text` restores it. Only the same model in the same precision can.
    """
    from decodery import load
    from decodery.extras.text_compression.text import compress as compressed
    from decodery.models.loaders.store import replacing, terminal_progress

    target = new_file(out or file.with_name(file.name + ENDING))
    data = read_file(file)
    with terminal_progress(counts=True) as progress:
        made = compressed(load(model, dtype=dtype), data, progress=progress)
    with replacing(target) as temporary:
        temporary.write_bytes(made)
    share = f", {8 * len(made) / len(data):.3f} bits per byte" if data else ""
    click.echo(f"{len(data):,} bytes -> {len(made):,} bytes{share}: {target}")


def new_file(path: Path) -> Path:
    """A file that is not there yet and can be written. Raises SettingsError for any other."""
    if path.exists():
        raise SettingsError(f"{path} exists: name another file with --out")
    if path.parent.exists() and not os.access(path.parent, os.W_OK):
        raise SettingsError(f"{path.parent} may not be written to: name another file with --out")
    return path


def read_file(path: Path) -> bytes:
    """The bytes of a file that may be a text or a compressed one. Raises SettingsError for one that is neither."""
    from decodery.extras.text_compression.file import MOST_BYTES

    if path.stat().st_size > 2 * MOST_BYTES:
        raise SettingsError(f"{path} is too long: compress parts of at most {MOST_BYTES:,} bytes")
    return path.read_bytes()

"""`decodery export-head`: a trained draft head in a layout that others read."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .options import model_options
from .train_common import out_option


@command(example="export-head my-head -m MODEL --out my-speculator")
@click.argument("head", metavar="HEAD")
@option(
    "--format", "layout", type=click.Choice(["speculators"]), default="speculators", show_default=True,
    help="Layout of the folder: that of vLLM's speculators.",
)  # fmt: skip
@out_option
@model_options
def export_head(head: str, layout: str, out: Path, model: str, dtype: str) -> None:
    """Write the draft head HEAD of MODEL to a folder that vLLM's speculators read.

    HEAD is a file or folder of `decodery train head`, a published head or a Hub id. Heads for eagle-3, p-eagle and mtp
    can be written, and those for dflash and dspark that norm queries and keys. Integer weights are written in floating
    point.
    """
    from decodery.models.loaders.load import load
    from decodery.speculative.heads.exported import write_speculators
    from decodery.speculative.heads.head import TrainedHead

    write_speculators(TrainedHead.load(head), load(model, dtype=dtype).model, out)
    click.echo(f"{out} holds the head in the layout of {layout}")

"""`decodery compress-model`: a cheaper copy of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from .command import command, option
from .options import import_option, model_options, output_option
from .train_common import FILE, out_option

if TYPE_CHECKING:
    from decodery.compression.base import Report


@command(example="compress-model smollm2 notes.txt --with slicegpt:share=0.1 --with int8 --out copy")
@click.argument("given", nargs=-1, metavar="[MODEL] [FILES]...")
@option(
    "--with", "specs", multiple=True, required=True, metavar="SPEC",
    help="A compression method, such as int8 or slicegpt:share=0.2. Repeatable; applied in the order given.",
)  # fmt: skip
@out_option
@option("--texts", default=64, show_default=True, help="Maximum number of text pieces to read.")
@option("--length", default=256, show_default=True, help="Tokens of a text piece.")
@import_option
@model_options
@output_option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def compress_model(
    ctx: click.Context,
    given: tuple[str, ...],
    specs: tuple[str, ...],
    out: Path,
    texts: int,
    length: int,
    model: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Make a smaller copy of MODEL in a folder, for -m DIR or --drafter draft-model:model=DIR.

    MODEL does not change. As a drafter, the copy does not change the text; as a model, it does. Text FILES are what
    some methods measure activations on. If -m names the model, all arguments are FILES. `decodery methods` lists the
    compression methods.
    """
    import numpy as np

    from decodery.compression.base import transformed
    from decodery.compression.folder import check_folder, save
    from decodery.core.registry import resolve
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.kind_data import TextFiles

    if given and ctx.get_parameter_source("model") is ParameterSource.DEFAULT:
        model, *given = given  # type: ignore[assignment]
    files = [FILE.convert(each, None, ctx) for each in given]
    transforms = [resolve("compression", spec) for spec in specs]
    check_folder(out)
    data = TextFiles(tuple(files), texts, length)
    data.check()
    loaded = load(model, dtype=dtype)
    read = [np.asarray(each) for each in data.pieces(loaded)] if files else []
    with terminal_progress(counts=True) as progress:
        changed, report = transformed(loaded.model, transforms, read, progress)
    save(out, changed, report, loaded)
    click.echo(json.dumps(report.as_dict()) if as_json else _told(report, out))


def _told(report: Report, out: Path) -> str:
    lines = [f"{stage.method}: {stage.error:.2%} of the changed parts' energy lost" for stage in report.stages]
    before, after = report.before, report.after
    lines.append(f"{before.bytes / 1e6:,.1f} MB -> {after.bytes / 1e6:,.1f} MB, {report.bits:.2f} bits per weight")
    lines.append(f"{before.macs / 1e6:,.1f} M -> {after.macs / 1e6:,.1f} M multiply-adds per token")
    return "\n".join([*lines, f"The copy is ready: {out}"])

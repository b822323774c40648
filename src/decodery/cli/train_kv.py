"""`decodery train kv`: what cache policies need to know of a model."""

from __future__ import annotations

from pathlib import Path

import click

from .training import FILE, command_line, model_option, out_option, pieces, texts_options


@click.group(short_help="Make what some cache policies need.")
def kv() -> None:
    """Make what some cache policies need."""


@kv.command("double-sparsity", short_help="Calibrate --kv double-sparsity:calibration=DIR.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@out_option
@model_option("whose keys are looked at")
@texts_options
def double_sparsity(files: tuple[Path, ...], out: Path, model: str, texts: int, length: int) -> None:
    """Find in text FILES which channels of MODEL's keys say most about attention: --kv double-sparsity:calibration=DIR.

    MODEL itself stays as it is. It takes as long as reading the texts does.
    """
    from dataclasses import replace

    from ..model.key_channels import CHANNELS
    from ..model.load import load
    from ..model.store import terminal_progress
    from ..train.key_channels import calibrate, check_folder

    check_folder(out)
    loaded = load(model)
    read = pieces(loaded, files, texts, length)
    with terminal_progress(counts=True) as progress:
        found = calibrate(loaded.model, read, progress)
    out.mkdir(parents=True, exist_ok=True)
    replace(found, facts={**found.facts, "command": command_line()}).save(out / CHANNELS)
    click.echo(f"The channels are ready: --kv double-sparsity:calibration={out}")

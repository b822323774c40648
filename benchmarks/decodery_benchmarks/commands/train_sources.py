"""`benchmarks/train.py sources`: the sources of a generated task."""

from __future__ import annotations

from itertools import islice

import click

from decodery.cli.command import command, option
from decodery_benchmarks.training import transductions


@command(example="")
@click.argument("kind")
@option("--count", default=8000, show_default=True, type=click.IntRange(1), help="Number of sources.")
def sources(kind: str, count: int) -> None:
    """Print sources of KIND, a generated task, one a line: reorder or normalise. decodery train cppd reads them."""
    for line in islice(transductions.sources(transductions.transduction(kind), "train"), count):
        click.echo(line)

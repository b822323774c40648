"""`decodery stego encode` and `decodery stego decode`: a message as a generated text, and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from .command import Entry, Group, command, option
from .given import read_prompt
from .options import chat_template_option, import_option, model_options, output_option

_MAX_INPUT = 1 << 24
_SURE = 0.99
SECTIONS = {
    "Commands": {
        "encode": Entry("Write a text that carries a message.", "stego"),
        "decode": Entry("Read the message of a text.", "stego"),
    }
}

_json_option = output_option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group(cls=Group, sections=SECTIONS, example='stego encode "Tell me about rivers." --message "meet at noon"')
def stego() -> None:
    """Write a message into a generated text, or read it (steganography)."""


@command(example='stego encode "Tell me about rivers." --message "meet at noon" --search coupling:key=secret')
@click.argument("prompt", required=False)
@option("--message", required=True, metavar="TEXT", help="The message.", heading="Message")
@option(
    "--search", default="coupling", show_default=True, metavar="SPEC", heading="Message",
    help="The method and its settings, such as coupling:key=secret,top_k=50.",
)  # fmt: skip
@option(
    "--max-new-tokens", type=int, default=1024, show_default=True, metavar="N", heading="Message",
    help="Stop after N tokens.",
)  # fmt: skip
@option(
    "--seed", type=int, default=0, show_default=True, metavar="N", heading="Message",
    help="Seed of the choices that the message leaves open.",
)  # fmt: skip
@import_option
@model_options
@chat_template_option("Continue the prompt as plain text, without the chat template.", heading="Output")
@_json_option
def encode(
    prompt: str | None,
    message: str,
    search: str,
    max_new_tokens: int,
    seed: int,
    model: str,
    dtype: str,
    apply_chat_template: bool,
    as_json: bool,
) -> None:
    """Answer PROMPT with a text whose tokens carry a message.

    `decodery stego decode` reads the message. The text ends once it holds the whole message. Without a key, anyone with
    the same model and prompt can read it. PROMPT is read from standard input if it is "-" or missing.
    """
    from decodery import load
    from decodery.core.registry import resolve
    from decodery.models.loaders.store import terminal_progress

    text, method = read_prompt(prompt), resolve("search", search)
    lm = load(model, dtype=dtype)
    with terminal_progress(counts=True) as progress:
        output = lm.stego_encode(
            *(text, message),
            search=method,
            apply_chat_template=apply_chat_template,
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=progress,
        )
    click.echo(json.dumps(output.to_dict(), ensure_ascii=False) if as_json else output.text, nl=as_json)


@command(example='stego decode "Tell me about rivers." --length 12 --search coupling:key=secret --text text')
@click.argument("prompt")
@option(
    "--length", required=True, type=click.IntRange(min=1), metavar="N", heading="Message",
    help="Length of the message in bytes.",
)  # fmt: skip
@option(
    "--text", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", heading="Message",
    help="The text. Without this option it is read from standard input.",
)  # fmt: skip
@option(
    "--search", default="coupling", show_default=True, metavar="SPEC", heading="Message",
    help="The method and its settings, as for stego encode.",
)  # fmt: skip
@import_option
@model_options
@chat_template_option("The prompt was continued as plain text, without the chat template.", heading="Output")
@_json_option
def decode(
    prompt: str,
    length: int,
    file: Path | None,
    search: str,
    model: str,
    dtype: str,
    apply_chat_template: bool,
    as_json: bool,
) -> None:
    """Read the message of N bytes that `decodery stego encode` wrote into its answer to PROMPT.

    Model, precision, prompt and settings must be the same as for encoding, and the text must be unchanged.
    """
    from decodery import load
    from decodery.core.errors import PromptError
    from decodery.core.registry import resolve

    from .decode import note

    try:
        # Every character counts, a final newline too.
        text = (sys.stdin.buffer.read(_MAX_INPUT) if file is None else file.read_bytes()[:_MAX_INPUT]).decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"the text is not UTF-8 (byte {error.start})") from error
    method = resolve("search", search)
    found = load(model, dtype=dtype).stego_decode(
        prompt, text, length, search=method, apply_chat_template=apply_chat_template
    )
    shown = found.message.decode(errors="replace")
    if as_json:
        click.echo(json.dumps({"message": shown, "hex": found.message.hex(), "certainty": found.certainty}))
    else:
        click.echo(shown)
        if found.certainty < _SURE:
            note(
                f"the message is {found.certainty:.1%} certain: "
                "the text is too short for it, or it was written at a lower rate"
            )

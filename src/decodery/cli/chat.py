"""`decodery chat`: a conversation whose cache is kept from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import DecoderyError
from .given import given
from .options import (
    Command,
    check_diffuse,
    constraint_options,
    decoding_options,
    diffuse_option,
    kv_dtype_option,
    model_options,
)

if TYPE_CHECKING:
    from ..lm import LM, Output


@click.command(cls=Command, short_help="Talk with a model.")
@model_options
@kv_dtype_option
@decoding_options
@constraint_options
@diffuse_option
def chat(model: str, dtype: str, kv_dtype: str, diffuse: str | None, **settings: Any) -> None:
    """Talk with a model, line by line.

    /reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer. Works with piped lines too.
    """
    settings = given(settings)
    from .. import load
    from ..registry import resolve
    from .decoding import leave_if_terminated, note

    if diffuse is not None:
        check_diffuse(settings)
        settings["diffuse"] = resolve("diffuse", diffuse)
    lm = load(model, dtype=dtype, kv_dtype=kv_dtype)
    conversation = Conversation(lm, settings)
    if sys.stdin.isatty():
        note(f"{lm.name}. /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer.")
    while (line := _read_line()) is not None:
        line = line.strip()
        if line == "/exit":
            break
        if line == "/reset":
            conversation = Conversation(lm, settings)
            note("forgotten; this is a new conversation.")
        elif line.startswith("/") and line[1:].isalpha():
            note(f"there is no {line}; there are /reset and /exit.")
        elif line:
            _answer(conversation, line)
            leave_if_terminated()


class Conversation:
    """The messages so far, and the last output, whose cache the next turn goes on with."""

    def __init__(self, lm: LM, settings: dict[str, Any]) -> None:
        self.lm = lm
        self.settings = settings
        self.messages: list[dict[str, str]] = []
        self.last: Output | None = None

    def say(self, text: str, write: Callable[[str], None]) -> Output:
        """The answer to `text`. A turn that fails, or is stopped before its first word, leaves no trace."""
        from .decoding import decode, fill

        messages, settings = [*self.messages, {"role": "user", "content": text}], dict(self.settings)
        tokens = self.lm.encode(messages)
        if (method := settings.pop("diffuse", None)) is not None:
            (output,) = fill(
                self.lm, [self.lm.fill(tokens, method, settings.pop("max_new_tokens", 256), **settings)], write
            )
        else:
            request = self.lm.request(tokens, reuse=self.last, **settings)
            (output,) = decode(self.lm, [request], write, keep_cache=True)
        if output.text:
            self.messages = [*messages, {"role": "assistant", "content": output.text}]
            self.last = output
        return output


def _answer(conversation: Conversation, line: str) -> None:
    from .decoding import Screen, figures, note

    screen = Screen()
    try:
        output = conversation.say(line, screen.write)
    except DecoderyError as error:
        click.echo(f"decodery: {error}", err=True)
        return
    screen.end()
    context = (
        f"context {len(output.prompt_tokens) + len(output.tokens)} of {conversation.lm.model.config.max_positions}"
    )
    note(f"[{figures(output)}, {context}]\n")


def _read_line() -> str | None:
    """The next line, None at the end. Two Ctrl-C in a row leave the program, one does not."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    from .decoding import note

    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its line editing and history)
    warned = False
    while True:
        try:
            return input("> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            note("\npress Ctrl-C again, or type /exit, to leave.")

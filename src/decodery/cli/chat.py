"""`decodery chat`: a conversation whose cache is kept from turn to turn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decodery.core.errors import DecoderyError, SettingsError

from .command import command
from .conversation import Conversation
from .given import given
from .options import loading_options, model_options
from .text_options import check_diffuse, constraint_options, decoding_options, diffuse_option

_COMMAND = re.compile(r"/[a-zA-Z]+(\s|$)")
_HELP = """\
/system TEXT  Put a system message before all turns; without TEXT, remove it.
/reset        Forget all turns.
/save FILE    Write the messages to FILE, as JSON.
/exit         Leave, as Ctrl-D does.
Alt-Enter, or a backslash at the end of a line, begins another line of the turn. Ctrl-C stops an answer."""


@command(example="chat -m smollm2 --temperature 0.7")
@model_options
@loading_options
@decoding_options
@constraint_options
@diffuse_option
def chat(model: str, dtype: str, kv_dtype: str, masking: str | None, diffuse: str | None, **settings: Any) -> None:
    """Talk with a model, turn by turn.

    Alt-Enter, or a backslash at the end of a line, starts a new line of a turn. A pasted text is part of one turn.
    Ctrl-C stops an answer, Ctrl-D leaves. /system TEXT sets the system message, /reset forgets the turns, /save FILE
    writes them as JSON, /help lists all commands. If the context is full, the oldest turns are dropped.

    If standard input is not a terminal, each line is one turn. The exit status is 1 if no turn was answered.
    """
    settings = given(settings)
    from decodery import load
    from decodery.core.registry import resolve

    from .chat_input import reader
    from .decode import leave_if_terminated, note

    if diffuse is not None:
        check_diffuse(settings)
        settings["diffuse"] = resolve("diffusion", diffuse)
    lm = load(model, dtype=dtype, kv_dtype=kv_dtype, masking=masking)
    conversation = Conversation(lm, settings)
    read = reader()
    if sys.stdin.isatty():
        note(f"{lm.name}. /help lists the commands, /exit leaves, Ctrl-C stops an answer.")
    answered, failed = 0, 0
    while (turn := read()) is not None and turn.strip() != "/exit":
        if not turn.strip():
            continue
        try:
            if _COMMAND.match(turn):
                _command(conversation, turn)
            else:
                _answer(conversation, turn.strip())
                answered += 1
        except DecoderyError as error:
            click.echo(f"decodery: {error}", err=True)
            failed += 1
        leave_if_terminated()
    if failed and not answered and not sys.stdin.isatty():
        raise click.exceptions.Exit(1)


def _command(conversation: Conversation, turn: str) -> None:
    from .decode import note

    name, *more = turn.strip().split(maxsplit=1)
    rest = "".join(more)
    commands: dict[str, Callable[[], str]] = {
        "/help": lambda: _HELP,
        "/reset": lambda: _reset(conversation),
        "/system": lambda: _system(conversation, rest),
        "/save": lambda: _save(conversation, rest),
    }
    if name not in commands:
        raise SettingsError(
            f"there is no {name}: there are {', '.join(commands)} and /exit; put a space before a turn that begins so"
        )
    note(commands[name]())


def _reset(conversation: Conversation) -> str:
    conversation.reset()
    return "the conversation is reset."


def _system(conversation: Conversation, text: str) -> str:
    conversation.instruct(text)
    return "the system message is set." if text else "there is no system message now."


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        raise SettingsError("/save needs the name of a file, as in /save talk.json")
    path = Path(name).expanduser()
    conversation.save(path)
    return f"written to {path}."


def _answer(conversation: Conversation, turn: str) -> None:
    from decodery.models.config import POSITIONS

    from .decode import Screen, figures, note

    def tell_dropped(turns: int) -> None:
        which = "the oldest turn is" if turns == 1 else f"the {turns} oldest turns are"
        note(f"the conversation fills the model's context of {conversation.context} tokens: {which} dropped.")

    with Screen() as screen:
        output = conversation.say(turn, screen.write, tell_dropped)
    about, context = figures(output), conversation.context
    # A server keeps to itself how many tokens its prompts have, and some cache policies have no end.
    if conversation.lm.model.capabilities.rows:
        end = f" of {context}" if context < POSITIONS.most else ""
        about += f", context {len(output.prompt_tokens) + len(output.tokens)}{end}"
    note(f"[{about}]\n")

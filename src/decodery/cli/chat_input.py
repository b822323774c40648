"""How `decodery chat` reads turns: an editor at a terminal, one turn per line from anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import DecoderyError, PromptError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyPressEvent
    from prompt_toolkit.output import Output

HISTORY = "chat_history"
"""The file in the cache directory that holds the turns typed before."""


def reader() -> Callable[[], str | None]:
    """The function that reads the next turn of standard input, and returns None at its end."""
    if not sys.stdin.isatty():
        return _read_line
    session = editor()
    return lambda: _read_turn(session)


def editor(keys: Input | None = None, screen: Output | None = None) -> PromptSession[str]:
    """An editor of turns: a pasted text is part of one turn, and Enter sends it.

    Alt-Enter, and Enter after a backslash at the end, begin another line of the turn.

    Args:
        keys: where keys come from; the terminal if None.
        screen: where the turn is shown; the terminal if None.

    Returns:
        The editor, whose `prompt` reads one turn.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    bindings = KeyBindings()

    @bindings.add("escape", "enter", eager=True)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def continued() -> bool:
        document = get_app().current_buffer.document
        return document.is_cursor_at_the_end and document.text.endswith("\\")

    @bindings.add("enter", filter=Condition(continued), eager=True)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.delete_before_cursor()
        event.current_buffer.insert_text("\n")

    if screen is None and not sys.stdout.isatty():
        # The answers go to a file or a pipe, and the person still has to see what they type.
        screen = create_output(always_prefer_tty=True)
    return PromptSession(
        "> ", history=_history(), key_bindings=bindings, prompt_continuation="  ", input=keys, output=screen
    )


def _history() -> History:
    """The turns typed before, in a file that only its owner may read; in memory where no such file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from decodery.models.loaders.store import home, make_directory

    try:
        path = make_directory(home()) / HISTORY
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except (OSError, DecoderyError):
        return InMemoryHistory()
    return FileHistory(path)


def _read_line() -> str | None:
    try:
        return sys.stdin.readline() or None
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from error


def _read_turn(session: PromptSession[Any]) -> str | None:
    """The next turn. Two Ctrl-C in a row leave the program, one does not."""
    from .decode import note

    warned = False
    while True:
        try:
            return str(session.prompt())
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            note("press Ctrl-C again, or type /exit, to leave.")

"""The `decodery` command: one module per sub-command, imported when it is asked for."""

from __future__ import annotations

import atexit
import difflib
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from decodery.core.errors import DecoderyError, SettingsError
from decodery.core.version import __version__

COMMANDS = (
    "demo",
    "pull",
    "generate",
    "chat",
    "serve",
    "batch",
    "hide",
    "reveal",
    "bench",
    "train",
    "transform",
    "compress",
    "decompress",
    "methods",
    "cache",
    "info",
)
"""In the order `--help` lists them; each is the `click` command of that name in the module of that name."""

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141


class Commands(click.Group):
    """Finds a command's module by its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return getattr(import_module(f".{name}", __package__), name) if name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=2) or COMMANDS
            raise click.UsageError(f"there is no command {args[0]!r}; try {', '.join(near)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader has gone, as in `decodery ... | head`.
            _silence()
            raise click.exceptions.Exit(BROKEN_PIPE) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Decode language models, fast and exactly.

    Begin with: decodery demo
    """


def _show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A warning as a line for its reader, without the place in the code it comes from."""
    click.echo(f"decodery: {message}", err=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the interpreter.

    Exit status: 0 done, 1 an error in one sentence, 2 wrong usage, 130 Ctrl-C outside a generation, 141 reader gone,
    143 SIGTERM.
    """
    # The interpreter would look through all that PyTorch brings for cycles once more before it goes.
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a stack trace.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        _require_streams()
        with warnings.catch_warnings():
            warnings.showwarning = _show
            status = cli.main(arguments, prog_name="decodery", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except DecoderyError as error:
        click.echo(f"decodery: {error}", err=True)
        status = FAILED
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except OSError as error:
        from decodery.models.loaders.store import is_full

        if not is_full(error):
            raise
        written = error.filename or "the output"
        click.echo(f"decodery: cannot write {written} ({error.strerror}): free some space or write elsewhere", err=True)
        status = FAILED
    try:
        sys.stdout.flush()
    except OSError:
        _silence()
    sys.exit(status)


def _require_streams() -> None:
    """Stand in for closed standard streams. Raises SettingsError for a closed output, where results would be lost."""
    closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stderr", "w"), ("stdout", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (it stays open)
    if closed:
        raise SettingsError("standard output is closed: leave it open, or send it elsewhere, as in > FILE")


def _silence() -> None:
    """Let what standard output still holds go nowhere; the interpreter flushes once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

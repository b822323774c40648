"""The `decodery` command. A module holds each sub-command and is imported when the command runs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from decodery.core.errors import DecoderyError, SettingsError
from decodery.core.version import __version__

from .command import Entry, Group

_START = {
    "generate": Entry("Answer one prompt.", example='generate "Explain tides in one sentence."'),
    "chat": Entry("Talk with a model.", example="chat -m smollm2"),
    "serve": Entry("Serve a model to OpenAI clients.", example="serve -m model.gguf --port 8000"),
    "bench": Entry("Measure decoding methods on this machine.", example="bench --methods none,prompt-lookup,auto"),
    "methods": Entry("List the decoding methods, or describe one.", example="methods prompt-lookup"),
}
SECTIONS = {
    "Start here": _START,
    "Run": {
        "pull": Entry("Download a model."),
        "cache": Entry("List or remove the stored models and measurements."),
        "info": Entry("Show the versions, this machine, its kernels and models."),
    },
    "Serve": {"batch": Entry("Answer a file of requests in OpenAI's batch format.")},
    "Measure": {
        "search-bench": Entry("Compare searches on your own problems."),
        "demo": Entry("Run three short tasks with and without speculation."),
    },
    "Train": {
        "train": Entry("Train what a method needs: draft models, heads, probes."),
        "compress-model": Entry("Make a smaller copy of a model."),
        "export-head": Entry("Write a draft head for vLLM."),
    },
    "More": {
        "compress-text": Entry("Compress a file with a model's predictions."),
        "decompress-text": Entry("Restore a file that compress-text made."),
        "stego": Entry("Write a message into a generated text, or read it."),
    },
}
"""The commands as the first screen lists them."""
COMMANDS = tuple(name for section in SECTIONS.values() for name in section)

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141


class Root(Group):
    """The group of all commands, which ends quietly where the reader of the output has gone."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and write all that it printed."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader has gone, as in `decodery ... | head`.
            _silence()
            raise click.exceptions.Exit(BROKEN_PIPE) from None


@click.group(cls=Root, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """\b
    Decode language models: one engine to generate, serve and measure.
    Speculative decoding makes it faster; the text stays the same.
    """


def _show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A warning as a line for its reader, without the place in the code it comes from."""
    click.echo(f"decodery: {message}", err=True)


def process() -> NoReturn:
    """The command as a process of its own, as it is installed."""
    status: str | int | None = FAILED

    def end() -> None:
        # Taking PyTorch apart costs half a second, and the process ends anyway.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status if isinstance(status, int) else FAILED)

    # Functions that are registered later run before this one, and threads have ended by then.
    atexit.register(end)
    # What imports make stays: looking through all of it again and again takes a fifth of the start.
    gc.set_threshold(100_000, 20, 50)
    try:
        main()
    except SystemExit as left:
        status = left.code
        raise


def main(arguments: Sequence[str] | None = None, *, group: click.Command = cli, name: str = "decodery") -> NoReturn:
    """Run the command of `group` that the arguments name, and leave the interpreter.

    Exit status: 0 done, 1 an error in one sentence, 2 wrong usage, 130 Ctrl-C outside a generation, 141 reader gone,
    143 SIGTERM.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a stack trace.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        _require_streams()
        with warnings.catch_warnings():
            warnings.showwarning = _show
            status = group.main(arguments, prog_name=name, standalone_mode=False) or 0
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

        if is_full(error):
            said = (
                f"cannot write {error.filename or 'the output'} ({error.strerror}): free some space or write elsewhere"
            )
        elif error.filename is not None:
            said = f"cannot use {error.filename} ({error.strerror}): check the path and its permissions"
        else:
            raise
        click.echo(f"decodery: {said}", err=True)
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

"""Decoding under the eyes of a person: text as it comes, Ctrl-C, and a line of figures."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from decodery.diffusion.texts import Fill
    from decodery.engine.request import Request
    from decodery.llm.llm import LLM, Output

TERMINATED = 143
_noted: set[int] = set()
"""The signals that came while something was being written."""
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if code not in (9, 10)}


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM inside is only noted, for the function this gives to report; a second one interrupts.

    A pass is never cut in two, so that the cache stays fit for use.
    """
    _noted.clear()

    def note(signal_number: int, frame: Any) -> None:
        if _noted:
            raise KeyboardInterrupt
        _noted.add(signal_number)

    previous = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(_noted)
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def leave_if_terminated() -> None:
    """Leave with the status of a program that SIGTERM ended, where one came: what was written until then is out."""
    if signal.SIGTERM in _noted:
        raise click.exceptions.Exit(TERMINATED)


def decode(
    lm: LLM, requests: list[Request], write: Callable[[str], None] | None = None, *, return_cache: bool = False
) -> list[Output]:
    """Decode requests of one prompt together, to the end or to a Ctrl-C, which keeps the text that is there.

    write: gets the pieces of the first one's text as they come; where a person is watching, a bar shows how much of a
    long prompt is read until the text begins.
    """
    from decodery.engine.text import unread
    from decodery.models.loaders.store import silent, terminal_progress

    engine = lm.engine()
    first = engine.submit(requests[0])
    sequences = [first, *(engine.submit(request, like=first) for request in requests[1:])]
    with stop_on_interrupt() as stopped, ExitStack() as showing:
        reads = write is not None and unread(first) > engine.prefill_chunk
        progress = showing.enter_context(terminal_progress(counts=True)) if reads else silent
        while not all(seq.finished for seq in sequences):
            engine.step()
            if stopped():
                for seq in sequences:
                    seq.cancel()
            if reads:
                progress("reading the prompt", first.cache.next_position, first.request.prompt_length)
                if first.finished or len(first.tokens) > first.request.prompt_length:
                    # The text takes the place of the bar.
                    showing.close()
                    reads = False
            if write is not None and first.text is not None:
                write(first.text.release(final=first.finished))
    return [lm.output(seq, return_cache=return_cache) for seq in sequences]


def fill(lm: LLM, fills: list[Fill], write: Callable[[str], None] | None = None) -> list[Output]:
    """Fill canvases together, to the end or to a Ctrl-C; `write` gets what can no longer change of the first one."""
    engine = lm.engine()
    fillings = [lm.begin(engine, each) for each in fills]
    with stop_on_interrupt() as stopped:
        while not all(each.work.finished for each in fillings):
            engine.step()
            if stopped():
                for each in fillings:
                    each.work.cancel()
            if write is not None:
                write(fillings[0].release())
    if errors := [each.work.error for each in fillings if each.work.error is not None]:
        raise errors[0]
    return [each.output() for each in fillings]


class Screen:
    """Writes a streamed text to standard output and ends its last line.

    On a terminal, control characters are left out: a model's text must not move the cursor or change a title.
    As a context it ends the line of what it wrote before an error, too.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last = ""

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or self._last:
            self.end()

    def write(self, piece: str) -> None:
        if piece:
            click.echo(piece.translate(_CONTROLS) if self._terminal else piece, nl=False)
            self._last = piece[-1]

    def end(self) -> None:
        if self._last != "\n":
            click.echo()


def figures(output: Output) -> str:
    """One line about a generation."""
    trace = output.trace
    parts = [f"{len(output.tokens)} tokens"]
    if trace.passes:
        parts += [f"{trace.tokens_per_pass:.2f} per pass", f"{trace.tokens_per_second:.0f} tokens/s"]
    parts.append(f"{trace.seconds:.1f} s")
    if output.context_full:
        parts.append("cut at the end of the model's context")
    elif output.finish_reason != "stop":
        parts.append("cut at the length limit" if output.finish_reason == "length" else "stopped")
    return ", ".join(parts)


def note_full(outputs: Sequence[Output]) -> bool:
    """Tell the person at the terminal where texts ended because the context was full; whether one did."""
    full = [output for output in outputs if output.context_full]
    if full:
        what = "the text was" if len(outputs) == 1 else f"{len(full)} of {len(outputs)} texts were"
        size = len(full[0].prompt_tokens) + len(full[0].tokens)
        note(
            f"{what} cut at the end of the model's context of {size} tokens: shorten the prompt, take a model with a "
            "longer context, or let the text go on with --cache-policy streaming-llm"
        )
    return bool(full)


def note(text: str) -> None:
    """A line for the person at the terminal, apart from the text."""
    click.secho(text, err=True, dim=True)

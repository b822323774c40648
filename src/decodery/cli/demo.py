"""`decodery demo`: a real model answers, and speculation is measured against plain decoding."""

from __future__ import annotations

import sys
from statistics import median
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..lm import LM, Output

PROMPT = """\
Correct the mistakes in this text.

The old lighthouse stands on a cliff above the harbour. Every evening the keeper climb the ninety steps, lights the \
lamp and write the weather into a book. When fog rolls in from the sea, he ring the bell until the last boat is home. \
In the morning he put out the lamp and climbs down again. On Sundays, visitors is welcome: they drink tea in the \
kitchen, look at the old maps and listen to stories about storms."""
"""A request whose answer repeats much of what was given, as edits and summaries do: what prompt lookup is for."""
NEW_TOKENS = 160
ROUNDS = 3


@click.command(short_help="Watch the embedded model, and see the speed-up.")
def demo() -> None:
    """Fetch the embedded model, answer a prompt, and compare with plain decoding.

    Greedy decoding with the default drafter, then rounds of both kinds in turn on the same prompt.
    """
    from .. import load
    from .decoding import Screen, decode, leave_if_terminated, note

    lm = load("smollm2")
    click.secho(PROMPT + "\n", dim=True)
    screen = Screen()
    request = lm.request(lm.encode(PROMPT), max_new_tokens=NEW_TOKENS)
    (shown,) = decode(lm, [request], screen.write)
    screen.end()
    leave_if_terminated()
    if shown.finish_reason == "cancelled":
        return
    if sys.stderr.isatty():
        note("\ncomparing with plain decoding ...")
    click.echo("\n" + _comparison(lm, shown))


def _comparison(lm: LM, shown: Output) -> str:
    """One line of figures: medians over rounds that alternate plain and speculative decoding."""
    seconds: dict[str, list[float]] = {"none": [], "auto": []}
    same = True
    for _ in range(ROUNDS):
        for drafter, times in seconds.items():
            output = lm.generate(PROMPT, max_new_tokens=NEW_TOKENS, drafter=drafter)
            assert not isinstance(output, list)
            same &= output.tokens == shown.tokens
            times.append(output.trace.decode_seconds)
    tokens, plain, drafted = shown.trace.tokens, median(seconds["none"]), median(seconds["auto"])
    return (
        f"{len(shown.tokens)} tokens, {shown.trace.tokens_per_pass:.2f} tokens per pass, "
        f"{tokens / drafted:.0f} tokens/s: {plain / drafted:.2f} x plain decoding ({tokens / plain:.0f} tokens/s), "
        + ("the same text" if same else "NOT the same text")
    )

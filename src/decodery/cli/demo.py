"""`decodery demo`: a real model does three short tasks, and speculation is measured against plain decoding."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import attrgetter
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .command import command
from .options import model_options

if TYPE_CHECKING:
    from decodery.core.trace import Trace
    from decodery.llm.llm import LLM, Output

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "author": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "genre": {"enum": ["novel", "poetry", "drama"]},
    },
    "required": ["title", "author", "year", "genre"],
    "additionalProperties": False,
}
CODE = """\
Rename the class Basket to Cart.

```python
class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        if price < 0:
            raise ValueError("a price is never negative")
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
```"""
BOOK = "Extract the facts as JSON: Pride and Prejudice is a novel by Jane Austen, published in 1813."


@dataclass(frozen=True)
class Task:
    """A prompt under a heading. schema: of the JSON to write, None for a free text."""

    name: str
    prompt: str
    schema: dict[str, Any] | None = None


TASKS = (
    Task("A chat answer", "Give me three tips for a good night's sleep."),
    Task("An edit of code", CODE),
    Task("JSON under a schema", BOOK, SCHEMA),
)
NEW_TOKENS = 120
ROUNDS = 2


@command(example="demo -m smollm2")
@model_options
def demo(model: str, dtype: str) -> None:
    """Do three short tasks, and compare with plain decoding: a chat answer, an edit of code, JSON under a schema.

    Greedy decoding with the default drafter, then rounds of both kinds in turn on the same prompt. Every run begins
    with a fresh memory: no figure comes from having seen the text before.
    """
    from decodery import load

    from .decode import Screen, decode, leave_if_terminated, note

    lm = load(model, dtype=dtype)
    if lm.dtype == "remote":
        raise SettingsError(f"demo measures passes of a model that runs here, and {model} is a server: give a model")
    factors = []
    for task in TASKS:
        click.secho(f"{task.name}\n", bold=True)
        click.secho(f"{task.prompt}\n", dim=True)
        screen, settings = Screen(), _settings(task)
        lm.reset_memory()
        (shown,) = decode(lm, [lm.request(lm.encode(task.prompt), **settings)], screen.write)
        screen.end()
        leave_if_terminated()
        if shown.finish_reason == "cancelled":
            return
        if sys.stderr.isatty():
            note("comparing with plain decoding ...")
        comparison = Comparison.of(lm, task.prompt, settings, shown)
        click.echo(f"\n{comparison.line()}\n")
        factors += [] if comparison.factor is None else [comparison.factor]
    if factors:
        mean = geometric_mean(factors)
        click.echo(f"geometric mean of {len(factors)}: {mean:.2f} x plain decoding, no text seen before")


@dataclass(frozen=True)
class Comparison:
    """One text, plain and drafted: of each kind the trace of the fastest round. same: whether all texts are."""

    shown: Output
    plain: Trace
    drafted: Trace
    same: bool

    @classmethod
    def of(cls, lm: LLM, prompt: str, settings: dict[str, Any], shown: Output) -> Comparison:
        """Rounds that alternate plain and speculative decoding, none of which remembers another."""
        traces: dict[str, list[Trace]] = {"none": [], "auto": []}
        same = True
        for _ in range(ROUNDS):
            for drafter, found in traces.items():
                lm.reset_memory()
                output = lm.generate(prompt, drafter=drafter, **settings)
                assert not isinstance(output, list)
                same &= output.tokens == shown.tokens
                found.append(output.trace)
        plain, drafted = (min(found, key=attrgetter("decode_seconds")) for found in traces.values())
        return cls(shown, plain, drafted, same)

    @property
    def factor(self) -> float | None:
        """How many times as fast as plain decoding; None for a text without any pass after its prompt's."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second if self.plain.passes else None

    def line(self) -> str:
        tokens = f"{len(self.shown.tokens)} tokens"
        if self.factor is None:
            return f"{tokens}: too few to compare"
        return (
            f"{tokens}, {self.drafted.tokens_per_pass:.2f} tokens per pass, {self.drafted.tokens_per_second:.0f} "
            f"tokens/s: {self.factor:.2f} x plain decoding ({self.plain.tokens_per_second:.0f} tokens/s), "
            + ("the same text" if self.same else "NOT the same text")
        )


def _settings(task: Task) -> dict[str, Any]:
    from decodery.constraints import JSONSchema

    constraint = {} if task.schema is None else {"constraint": JSONSchema(task.schema)}
    return {"max_new_tokens": NEW_TOKENS, **constraint}

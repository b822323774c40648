"""`decodery search-bench`: searches compared on own problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from decodery.core.errors import SettingsError

from .command import command
from .decode import stop_on_interrupt
from .options import chat_template_option, import_option, model_options, option_under, output_option

_OWN = "Searches"
_EXAMPLE = (
    "search-bench problems.jsonl --search 'self-consistency:n={n}' --search 'best-of-n:scorer=self-evaluation,n={n}' "
    "--out compared"
)


@command(example=_EXAMPLE)
@click.argument("problems", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@model_options
@import_option
@option_under(
    _OWN,
    "--search",
    "searches",
    multiple=True,
    required=True,
    metavar="SPEC",
    help="A search; {n} is the budget, and the scorer {examples} runs a problem's examples. Repeatable: the first one "
    "at the first budget is what others are compared with.",
)
@option_under(
    _OWN,
    "--budgets",
    default="1,4,16",
    show_default=True,
    metavar="N,N",
    help="Texts per problem, what {n} stands for.",
)
@option_under(
    "Data",
    "--prompt",
    default="{question}",
    show_default=True,
    metavar="TEXT",
    help="What the model is asked; {question} is the problem's text.",
)
@chat_template_option("Continue the prompt instead of answering it as a chat.")
@option_under("Data", "--limit", type=click.IntRange(min=1), metavar="N", help="Use the first N problems.")
@option_under(
    "Data",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="N",
    help="Maximum tokens of a text.",
)
@option_under("Data", "--temperature", type=float, default=0.8, show_default=True, metavar="X", help="Of sampling.")
@option_under("Data", "--stop", multiple=True, metavar="TEXT", help="Text that ends a text. Repeatable.")
@option_under(
    "Data",
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Decides what is drawn.",
)
@option_under(
    "Data",
    "--answer",
    type=click.Choice(["auto", "number", "marked", "whole", "choice", "quantity"]),
    default="auto",
    show_default=True,
    help="Where answers stand in a text.",
)
@option_under("Data", "--pattern", metavar="REGEX", help="A regular expression of answers in its place.")
@output_option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder of the results; a comparison that was interrupted goes on from there.",
)
@output_option("--seconds", type=float, metavar="S", help="Begin no problem after so many seconds.")
def search_bench(problems: Path, model: str, dtype: str, out: Path, limit: int | None, **given: Any) -> None:
    """Compare searches on your own problems: accuracy against tokens, with intervals.

    PROBLEMS has a JSON object a line: a `question` and its `answer`, or a `prompt` and `tests`.
    """
    from decodery import load
    from decodery.bench.searches.figures import table
    from decodery.bench.searches.job import SearchJob, Settings
    from decodery.bench.searches.problems import read_problems
    from decodery.bench.terminal import progress_bar

    try:
        budgets = tuple(int(each) for each in given.pop("budgets").split(","))
    except ValueError:
        raise SettingsError("--budgets is a list of integers, such as 1,4,16") from None
    seconds, pattern = given.pop("seconds"), given.pop("pattern") or ""
    settings = Settings(tuple(given.pop("searches")), budgets, stop=tuple(given.pop("stop")), pattern=pattern, **given)
    asked = read_problems(problems)[:limit]
    job = SearchJob(load(model, dtype=dtype), asked, settings, out, seconds)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = job.run(report, stopped)
    click.echo(table(result["rows"]))
    if not result["complete"]:
        click.echo(f"Not all problems are done: give the same command again to go on from {out}.", err=True)

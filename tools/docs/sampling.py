"""The generated parts of the documentation about samplers, sources and searches, from what the benchmarks recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, table, table_of

from decodery.core import registry
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.acceptance.lookahead import LookaheadRule
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.testing import tiny_transformer

KINDS = {"logits-processor": "processor", "acceptance-rule": "rule", "logits-source": "source", "search": "search"}
"""What a method of these families is."""


def samplers() -> str:
    """What samplers and rules that look ahead do to texts."""
    parts = []
    for group, (about, columns) in _GROUPS.items():
        result = load(f"samplers-{group}")
        rows = {name: _flat(run) for name, run in result["rows"].items()}
        facts = f"`{result['command']}`: {result['texts']} texts of {result['tokens']} tokens"
        parts.append(f"**{_TITLES[group]}.** {about} {facts}.\n\n{table_of(rows, columns)}")
    return "\n\n".join(parts)


_TITLES = {"mirostat": "Mirostat", "top-h": "Top-H", "repetition": "Repetition", "lookahead": "Looking ahead"}
_GROUPS = {
    "mirostat": (
        "Surprise against its target `tau`, and how far the means of single texts lie apart.",
        ("bits per token", "deviation between texts"),
    ),
    "top-h": (
        "At every position the entropy of what is drawn from, as a share of the whole one: the paper's bound of 0.4 "
        "holds at all of them, that of the published code is another. Surprise is under the model at temperature 1.",
        ("positions", "positions above alpha", "greatest share of the entropy", "bits per token"),
    ),
    "repetition": (
        "How repetitive and how surprising texts are that begin like a passage.",
        ("repeated 4-grams", "distinct 2-grams", "bits per token"),
    ),
    "lookahead": (
        "Sums of two-digit numbers after four examples, and prose; tokens read ahead are extra.",
        (
            *("sums right of 100", "rows per token of a sum", "bits per token", "repeated 4-grams"),
            *("extra passes per token", "extra rows per token"),
        ),
    ),
}


def speculation() -> str:
    """What every method that could mind drafts costs, and whether its texts stay the same with them."""
    result = load("samplers-speculation")
    runs = result["rows"]
    rows = [
        (
            f"`{method.name}`",
            kind,
            *_costs(result["rows"].get(method.name, {}), method, takes_drafts=kind != "search"),
        )
        for family, kind in KINDS.items()
        for method in registry.methods(family)
        if family == "logits-source" or method.name in runs or issubclass(method.cls, LookaheadRule)
    ]
    head = ("method", "kind", "passes", "rows", "of these or besides", "with a drafter", "tokens per pass then")
    refused = f'A search refuses a drafter: "{_refusal()}".'
    return f"`{result['command']}`\n\n{table(head, rows)}\n\n{refused}"


def _costs(run: dict[str, Any], method: registry.Method, *, takes_drafts: bool) -> tuple[str, ...]:
    """Passes, rows and what else was counted of a run, if there is one; how its texts fare with a drafter.

    The text of a lossy method is not the model's, with a drafter or without one.
    """
    known = {"passes", "rows", "texts", "same", _DRAFTED}
    counts = [f"{name.replace('_', ' ')} {count:.2f}" for name, count in run.items() if name not in known]
    figures = *(f"{run[name]:.2f}" if name in run else "" for name in ("passes", "rows")), ", ".join(counts)
    if not takes_drafts:
        return *figures, "takes none", ""
    if "same" not in run:
        lossy = ", which is not the model's" if method.guarantee.startswith("lossy") else ""
        return *figures, f"the text without one{lossy}", ""
    return *figures, f"{run['same']} of {run['texts']} texts the same", f"{run[_DRAFTED]:.2f}"


_DRAFTED = "tokens per pass, drafted"


def _refusal() -> SettingsError:
    """What a search says to a drafter."""
    try:
        registry.resolve("search", "beam").run(Engine(tiny_transformer()), Request([1], drafter=PromptLookup()))
    except SettingsError as error:
        return error
    raise AssertionError("a search takes drafts: this section has to be written anew")


def agreement() -> str:
    """What was compared with transformers, text by text and law by law."""
    result = load("agreement")
    rows = []
    for group, what in (("texts", "texts"), ("laws", "laws")):
        for name, facts in result[group].items():
            rows.append((name, f"{facts['same']} of {facts[what]} {what}", facts["transformers"]))
    return table(("method", "the same", "transformers"), rows)


def searches() -> str:
    """What exact-extract and contrastive search find and cost."""
    extract, contrastive = load("search-extract").figures, load("search-contrastive").figures
    whole = {name: f"{count:g}" for name, count in extract.items()}
    beams, diverse, coupling = (load(f"search-{name}") for name in ("beam", "diverse", "coupling"))
    default, others = coupling.figures["default"], coupling.figures["settings"]
    return (
        f"**Beam search.** {beams['about']}\n\n"
        + table_of(beams.figures, ("logprob", "better", "equal", "worse", "rows_per_token"))
        + f"\n\n**Diverse Beam Search.** {diverse['about']}\n\n"
        + table_of(_ticked(diverse.figures), ("distinct_2", "best", "mean", "rows_per_token"))
        + f"\n\n**Coupling.** {coupling['about']} With the defaults {default['read_exactly']} of "
        f"{default['messages']} messages were read back exactly; efficiency: the share of the choice there was that "
        "the message used.\n\n"
        + table_of({"defaults": default, **_ticked(others)}, ("bits_per_token", "nats_per_token", "efficiency"))
        + f"\n\n**Exact-extract.** {whole['passages']} problems of GSM8K as passages, with {whole['spans']} spans: the "
        f"answer is the one found by scoring every span in {whole['agree_with_every_span_scored']} of "
        f"{whole['passages']}, its score in {whole['agree_in_score_to_1e-6']}. That took {whole['rows']} rows in "
        f"{whole['passes']} passes in place of {whole['rows_to_score_every_span']} in "
        f"{whole['passes_to_score_every_span']}. The greedy answer was the best span in "
        f"{whole['greedy_is_the_optimum']} of {whole['passages']}.\n\n"
        "**Contrastive search.** 96 tokens that continue a prompt as plain text.\n\n"
        + table_of(
            _ticked(contrastive),
            ("repeated_2", "repeated_4", "distinct_2", "nats_per_token", "passes_per_token", "rows_per_token"),
        )
    )


def _ticked(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Runs whose names are settings."""
    return {f"`{name}`": run for name, run in runs.items()}


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """A run whose groups of figures stand among its figures."""
    return {
        key: each
        for name, value in run.items()
        for key, each in (value.items() if isinstance(value, dict) else ((name, value),))
    }


def processor_costs() -> str:
    """Milliseconds of a node under every processor, by the length of the text."""
    found = load("processors")
    lengths = list(next(iter(found["milliseconds"].values())))
    rows = [
        [f"`{name}`", *(f"{cells[length]:.2f}" for length in lengths)] for name, cells in found["milliseconds"].items()
    ]
    return f"`{found['command']}`, one thread.\n\n" + table(["", *(f"{length} tokens" for length in lengths)], rows)


def handoff() -> str:
    """What a text is worth to the larger model by the share of it that this wrote, and where."""
    found = load("search-handoff")
    runs = found["rows"]
    hard = {name: each for name, each in runs.items() if name.startswith("difficulty ")}
    shares = sorted({each["share"] for name, each in runs.items() if 0 < each["share"] < 1 and name not in hard})
    rows = []
    for where in ("beginning", "end", "by chance"):
        cells = [runs[f"{where} {share:g}"] for share in shares]
        rows.append([where, *(f"{each['nats']:.2f} ± {each['standard error']:.2f}" for each in cells)])
    none, all_of_it = runs["none 0"], runs["all 1"]
    return (
        f"`{found['command']}` ({found['questions']} questions, {found['tokens']} tokens each)\n\n"
        + table(["the larger model writes", *(f"{share:.0%}" for share in shares)], rows)
        + f"\n\nNothing of it: {none['nats']:.2f} ± {none['standard error']:.2f}; all of it: "
        f"{all_of_it['nats']:.2f} ± {all_of_it['standard error']:.2f}.\n\n"
        + table(
            ["from the draft's entropy above / to its own below", "its share", "nats per token"],
            [
                [
                    name.removeprefix("difficulty ").replace("/", " / "),
                    f"{each['share']:.0%}",
                    f"{each['nats']:.2f} ± {each['standard error']:.2f}",
                ]
                for name, each in hard.items()
            ],
        )
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "samplers": samplers,
    "speculation": speculation,
    "agreement": agreement,
    "searches": searches,
    "handoff": handoff,
    "processor-costs": processor_costs,
}

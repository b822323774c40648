"""The generated parts of the documentation about constraints, searches and sources, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, load_all, runs_of, table, table_of


def constraints() -> str:
    """What the figures of constraints say."""
    found = {name: load(f"constraints-{name}").figures for name in ("suite", "declared", "identity", "forced")}
    suite, (works, tried) = found["suite"]["all"], found["declared"]["all"]
    lines = [
        f"**JSON Schema Test Suite** (draft 2020-12): of the instances under schemas that are enforced, "
        f"{suite['valid accepted']} of {suite['valid accepted'] + suite['valid not accepted']} valid ones are accepted "
        f"and {suite.get('invalid accepted', 0)} of {suite['invalid not accepted']} invalid ones.",
        f"**JSONSchemaBench**: {works} of {tried} schemas of the sample are enforced.",
        table(
            ("dataset", "enforced", "of"),
            [(name.replace("_", " "), str(a), str(b)) for name, (a, b) in found["declared"]["datasets"].items()],
        ),
        "**Identity** with constrained plain decoding:",
        table(
            ("setting", "finished, valid", *(name for name in _first(found["identity"]) if name != "plain")),
            [_identity(setting, each) for setting, each in found["identity"].items()],
        ),
        "**Tokens per pass**:",
        _tokens_per_pass(found["forced"]),
    ]
    return "\n\n".join(lines)


def _first(figures: dict[str, Any]) -> dict[str, Any]:
    return next(iter(figures.values()))


def _identity(setting: str, each: dict[str, dict[str, int]]) -> tuple[str, ...]:
    ended = f"{each['plain']['finished']}, {each['plain']['valid']}"
    return (setting, ended, *(_same(counts) for drafter, counts in each.items() if drafter != "plain"))


def _same(counts: dict[str, int]) -> str:
    excused = f" + {counts['excused']} near-ties" if counts["excused"] else ""
    return f"{counts['identical']}{excused} / {counts['checked']}"


def _tokens_per_pass(figures: dict[str, float]) -> str:
    settings = list(dict.fromkeys(name.partition(": ")[0] for name in figures))
    drafters = list(dict.fromkeys(name.partition(": ")[2] for name in figures))
    rows = [(drafter, *(f"{figures[f'{each}: {drafter}']:.2f}" for each in settings)) for drafter in drafters]
    return table(("drafter", *settings), rows)


def monitor() -> str:
    """How many attributes exist, with the monitor and without."""
    found = load("monitor")
    rows = []
    for setting, each in found["rows"].items():
        exist, missing = each.get("exists", 0), each.get("missing", 0)
        if exist + missing:
            counts = (f"{exist} of {exist + missing}", f"{each['share']:.0%}", str(each.get("unknown", 0)))
            rows.append((f"`{setting}`", str(each["texts"]), *counts))
    return (
        f"Attributes that {found['settings']['model']} writes after objects of an unknown package, over "
        f"{found['settings']['prompts']} beginnings of functions and up to {found['settings']['new_tokens']} tokens "
        f"each; the last column has objects whose type only running the code would tell.\n\n"
        + table(("setting", "texts", "exist", "share", "not known"), rows)
    )


def pg_td() -> str:
    """Problems solved within so many passes."""
    found = load("pg-td")
    grid = list(next(iter(found["rows"].values()))["solved"])
    rows = []
    for setting, each in found["rows"].items():
        solved = (str(each["solved"][most]) for most in grid)
        rows.append((setting, str(each["problems"]), *solved, str(each["public"]), str(each["programs"])))
    return (
        f"Functions of one line by {found['settings']['model']}: how many of them pass hidden tests after so many "
        "passes, taking the first program that passes three public ones.\n\n"
        + table(("search", "problems", *(f"{most} passes" for most in grid), "pass public tests", "programs"), rows)
    )


def steered() -> str:
    """How often completions are secure after each of SVEN's prefixes, and what these do to other code."""
    found = load("sven")
    weaknesses = list(found["rows"]["none"]["counts"])
    rows = []
    for control in ("secure", "none", "unsafe"):
        counts = found["rows"][control]["counts"]
        cells = [f"{each['secure']} / {each['unsafe']} / {each['neither']}" for each in counts.values()]
        moved = f"{found['kl'][control]:.3f}" if control in found["kl"] else ""
        rows.append([control, f"{found['rows'][control]['rate']:.0%}", *cells, moved])
    return (
        f"{found['templates']} beginnings of programs, {found['samples']} continuations each at temperature "
        f"{found['temperature']}: the rate of secure ones among secure and unsafe ones, then secure / unsafe / neither "
        f"by weakness, and the divergence from the model on neutral code, in nats per token. `{found['command']}`\n\n"
        + table(["control", "secure rate", *weaknesses, "KL"], rows)
    )


def extraction() -> str:
    """F1 of extraction as code, free and constrained."""
    found = load("extraction")
    runs = found["rows"]
    rows = [
        [f"{name}, {how}", str(runs[name]["can be read"]), *(f"{value:.3f}" for value in runs[name][how].values())]
        for name in ("free", "constrained")
        for how in ("read whole", "item by item")
        if how in runs[name]
    ]
    kinds = list(runs["constrained"]["read whole"])
    return (
        f"F1 on {found['sentences']} synthetic sentences, with three solved examples (`{found['command']}`):\n\n"
        + table(["answers", "can be read", *kinds], rows)
    )


def smc() -> str:
    """What sequential Monte Carlo finds that masks and samples do not."""
    return "\n\n".join(_figures(f"smc-{name}") for name in ("posterior", "reward", "lookahead"))


def checks() -> str:
    """How many tokens are asked about in place of a mask."""
    return _figures("smc-checks")


def _figures(name: str) -> str:
    """The figures of a result file that says what it is about and which command made it; numbers stand apart."""
    result = load(name)
    rows = runs_of(result.figures)
    facts = "".join(f" {each.capitalize()}: {value}." for each, value in result.figures.items() if each not in rows)
    return f"{result['about']}{facts} (`{result['command']}`)\n\n{table_of(rows)}"


def sources() -> str:
    """A table per measured group of logit sources: counts per output token, prompts included."""
    parts = []
    for name, result in load_all("sources-*").items():
        found = result.figures
        runs = {**found.get("thresholds", {}), **{name: run for name, run in found.items() if name != "thresholds"}}
        rows = runs_of(runs)
        facts = ", ".join(f"{name}: {value}" for name, value in runs.items() if name not in rows)
        about = " ".join(result["about"].split()) + (f" ({facts})" if facts else "")
        parts.append(f"**{name.removeprefix('sources-')}.** {about}\n\n{table_of(rows)}")
    return "\n\n".join(parts)


def superposed() -> str:
    """What three superposed drafts are worth, and in how many steps their n-grams knew anything."""
    found = load("draft-parallel-superposed")
    rows = [
        [
            name,
            f"{each['perplexity']:.2f}",
            f"{each['perplexity_of_the_best']:.2f}",
            f"{each['greedy_is_among_them']:.2f}",
            f"{each['greedy_beginning_is']:.2f}",
            f"{each['steps_with_ngrams']} / {each['steps']}" if "steps" in each else "",
            str(each["target_passes"]),
        ]
        for name, each in found["rows"].items()
    ]
    header = ["three drafts", "perplexity", "of the best", "greedy is one", "greedy begins one"]
    return table([*header, "steps with n-grams", "passes"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "sources": sources,
    "superposed": superposed,
    "constraints": constraints,
    "smc": smc,
    "checks": checks,
    "steered": steered,
    "extraction": extraction,
    "monitor": monitor,
    "pg-td": pg_td,
}

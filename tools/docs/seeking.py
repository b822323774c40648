"""What searches find that revise, escalate, adapt and retrieve, and what learning from searches is worth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from figures import load, recorded, table
from searching import share_of, steps

_REVISED = ',shown="{attempt}{remark}|"', ',ask=""', ",pattern={pattern}", "scorer={scorer},"
_TOLD = {"noise=3.0": "a fifth wrong", "optimism=-30.0": "all or nothing"}


def finish() -> str:
    """What length tells, where slips are taken back: accuracy by budget, tokens and depth at the largest."""
    result = load("search-finish")
    settings, signs = result["settings"], result["signs"]
    budgets, found = settings["budgets"], dict[str, dict[int, Any]]()
    for row in result["rows"]:
        found.setdefault(row["method"], {})[row["n"]] = row
    rows = []
    for method, by_budget in found.items():
        last = by_budget[max(by_budget)]
        shares = [f"{by_budget[n]['accuracy']:.3f}" if n in by_budget else "" for n in budgets]
        costs = [f"{last['tokens']:.0f}", f"{last['depth']:.0f}"]
        rows.append([f"`{method}`", *shares, f"{(last['high'] - last['low']) / 2:.3f}", *costs])
    by_marks = ", ".join(f"{share:.3f} of {count} with {marks}" for marks, (count, share) in signs["by_marks"].items())
    about = (
        f"{result['rows'][0]['puzzles']} puzzles of `{settings['puzzle']}`, temperature {settings['temperature']:g}, a "
        f"pool of {settings['pool']}; ± and costs at the largest n. In {signs['puzzles']} puzzles with texts of both "
        f"kinds a right text is shorter than a wrong one in {signs['shorter']:.1%} of pairs, ties half, and has fewer "
        f"`{signs['mark']}` in {signs['fewer']:.1%}. Right of all texts that ended, by these: {by_marks}."
    )
    shown = table(["method", *(f"n={n}" for n in budgets), "±", "tokens", "depth"], rows)
    voted = [
        [each["kind"], str(each["n"]), f"{each['accuracy']:.3f}", "{:+.3f} ({:+.3f} to {:+.3f})".format(*_gain(each))]
        for each in signs["votes"]
    ]
    head = ["a vote of", "n", "right", "over the plain vote, ties to the shorter (95 %)"]
    return f"{about}\n\n{shown}\n\n{table(head, voted)}"


def _gain(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["gain"], *row["interval"]


def enough() -> str:
    """Sampling until it is enough, and what its head tells along a text."""
    along = load("search-enough")["along"]
    rows = [
        [f"{each['place']:.0%}", *(f"{each[name]:.3f}" for name in ("no_better", "right", "error"))]
        for each in along["places"]
    ]
    about = (
        f"Output of the head along {along['texts']} texts that ended, {along['right']:.1%} of which are right; "
        f"another text of the same pool is no better in {along['no_better']:.1%} of pairs."
    )
    head = ["of a text", "AUC, another is no better", "AUC, it is right", "mean error of ten bins"]
    return f"{steps('search-enough')}\n\n{about}\n\n{table(head, rows)}"


def prog() -> str:
    """Rounds of attempts: a row per search and budget, a column per reward."""
    result = load("search-prog")
    settings, found = result["settings"], dict[tuple[str, int], dict[str, Any]]()
    for row in result["rows"]:
        found.setdefault((row["method"], row["n"]), {})[row["reward"]] = row
    rewards, rows = settings["rewards"], []
    for (method, n), by_reward in found.items():
        for part in _REVISED:
            method = method.replace(part, "")
        one = next(iter(by_reward.values()))
        shown = [f"{by_reward[each]['accuracy']:.3f}" if each in by_reward else "" for each in rewards]
        shown[0] = shown[0] or f"{one['accuracy']:.3f}"
        gains = [one[name] for name in ("even", "even_low", "even_high") if name in one]
        even = "{:+.3f} ({:+.3f} to {:+.3f})".format(*gains) if gains else ""
        rows.append([f"`{method}`", str(n), *shown, even, f"{one['tokens']:.0f}", f"{one['depth']:.0f}"])
    named = [next((name for sign, name in _TOLD.items() if sign in each), "examples passed") for each in rewards]
    widest = max((row["high"] - row["low"]) / 2 for row in result["rows"])
    about = (
        f"{result['rows'][0]['puzzles']} puzzles of `{settings['puzzle']}`, temperature {settings['temperature']:g}; "
        f"95 % intervals are up to {widest:.2f} either way; gains and costs with the first reward."
    )
    head = ["method", "n", *named, "over best-of-n at equal tokens (95 %)", "tokens", "depth"]
    return f"{about}\n\n{table(head, rows)}"


def optimal() -> str:
    """Which search is best for puzzles of which difficulty, and what choosing by it is worth."""
    figures = load("search-optimal").figures
    rows = [
        [each["search"], f"{each['tokens']:.0f}", *(f"{share:.3f}" for share in each["right"])]
        for each in figures["rows"]
    ]
    columns = [f"of {count} {name}" for count, name in zip(figures["in_bins"], ("hardest", "", "easiest"), strict=True)]
    heat = table(["search", "tokens", *(column.strip() for column in columns)], rows)
    told = [
        [f"{row['budget']:g}", *(f"{row[name]:.3f}" for name in ("single", "accuracy", "known"))]
        for row in figures["crossed"]
    ]
    head = ["texts' tokens", "the best search for all", "by 4 scores", "by known difficulty"]
    return f"{figures['puzzles']} puzzles of `chain`, the noisy reward.\n\n{heat}\n\n{table(head, told)}"


def infalign() -> str:
    """Win rates of transforms at the same distance from the untrained model."""
    result = load("search-infalign")
    distances, found = result["settings"]["distances"], dict[tuple[int, str], list[str]]()
    for row in result["rows"]:
        found.setdefault((row["n"], row["transform"]), []).append(f"{row['win_rate']:.3f}")
    rows = [[str(n), kind, *rates] for (n, kind), rates in found.items()]
    return table(["best of", "transform", *(f"{each:g} nats" for each in distances)], rows)


Counted = Callable[[dict[str, int]], list[str]]


def _rows(figures: dict[str, Any], counted: Counted, tokens: bool = True) -> list[list[str]]:
    return [
        [name, share_of(each), *([f"{each['tokens']:.0f}"] if tokens else []), *counted(each["counts"])]
        for name, each in figures.items()
        if "share" in each
    ]


def pair() -> str:
    """Two models, step by step."""
    result = load("search-pair")
    figures, router = result.figures, result.figures["router"]

    def counted(counts: dict[str, int]) -> list[str]:
        kept, own = counts.get("kept", 0), counts.get("escalated", 0) + counts.get("rewritten", 0)
        wasted = f"{counts['wasted']} of {own}" if "wasted" in counts else ""
        return [f"{own / (kept + own):.2f}" if kept + own else "", wasted]

    about = (
        f"{result['settings']['prompts']} puzzles of `chain`, greedy. The router learned from {router['steps']} steps, "
        f"{router['better']:.1%} of which the larger model wrote better; Spearman of its probabilities with that gain "
        f"on held-out texts {router['spearman']:.2f}."
    )
    head = ["who decides, threshold", "right (95 %)", "steps by the larger model", "of these no better"]
    return f"{about}\n\n{table(head, _rows(figures, counted, tokens=False))}"


def edge() -> str:
    """One model, its adapter, its switch and its budgets."""
    result = load("search-edge")
    figures, prompts = dict(result.figures), result["settings"]["prompts"]
    switched = {f"switch at {threshold}": each for threshold, each in figures.pop("switch").items()}

    def counted(counts: dict[str, int]) -> list[str]:
        return [f"{counts['reasoned'] / prompts:.2f}" if "reasoned" in counts else ""]

    told = ", ".join(f"{each['nats']:.3f} ({name})" for name, each in figures.items() if "nats" in each)
    about = f"{prompts} puzzles of `direct-chain:operations=4`. Nats per token of held-out worked solutions: {told}."
    head = ["", "right (95 %)", "tokens", "prompts reasoned about"]
    return f"{about}\n\n{table(head, _rows(figures | switched, counted))}"


def plain(name: str, about: str, *counts: str) -> str:
    """A row per figure. counts: of ledgers, which are shown per prompt."""
    result = load(name)
    prompts = result["settings"]["prompts"]
    head = ["", "right (95 %)", "tokens", *(each.replace("_", " ") for each in counts)]
    rows = _rows(result.figures, lambda found: [f"{found.get(each, 0) / prompts:.1f}" for each in counts])
    return f"{prompts} {about}\n\n{table(head, rows)}"


_LEARNED = {
    "preferred": "better step likelier",
    "reward": "reward",
    "win_rate": "best of 4 beats best of 4",
    "win_rate_of_one": "one beats one",
    "kl": "nats away",
}


def rounds(name: str) -> str:
    """What models are worth that learned, on test puzzles; further figures where they are known."""
    result = load(name)
    extra = list(dict.fromkeys(key for each in result.figures.values() for key in each if key in _LEARNED))
    rows = []
    for kind, each in result.figures.items():
        shares = [share_of(each[column]) for column in ("greedy", "one", "pass@8")]
        rows.append([kind, *shares, *(f"{each[key]:.3f}" if key in each else "" for key in extra)])
    head = ["", "greedy", "one sample", "one of 8", *(_LEARNED[key] for key in extra)]
    return f"{result['settings']['prompts']} test puzzles of `chain`.\n\n{table(head, rows)}"


def grpo() -> str:
    """What models are worth that learned from rewards, and what held-out puzzles said on the way."""
    result = load("search-grpo")
    columns = ("reward", "win_rate", "win_rate_of_one", "kl")
    rows = [
        [kind, step, *(f"{values[name]:.3f}" for name in columns)]
        for kind, each in result.figures.items()
        for step, values in each.get("along", {}).items()
    ]
    head = ["worth", "step", *(_LEARNED[name] for name in columns)]
    return f"{rounds('search-grpo')}\n\n{table(head, rows)}"


_EVERY: dict[str, Callable[[], str]] = {
    "ahead": partial(steps, "search-ahead"),
    "early": partial(steps, "search-early"),
    "enough": enough,
    "finish": finish,
    "prog": prog,
    "pair": pair,
    "edge": edge,
    "budget": partial(plain, "search-budget", "puzzles of `retry-chain`; samples at temperature 1."),
    "ttt": partial(
        plain, "search-ttt", "questions of one hop over facts about twelve people, the embedded model in float32."
    ),
    "drag": partial(
        plain, "search-drag", "questions over facts about people, the embedded model.", "context_tokens", "retrievals"
    ),
    "orpo": partial(rounds, "search-orpo"),
    "grpo": grpo,
    "infalign": infalign,
    "optimal": optimal,
}
SECTIONS = {name: section for name, section in _EVERY.items() if recorded(f"search-{name}")}

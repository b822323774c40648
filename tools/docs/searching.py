"""What searches find on puzzles, on real questions and on programs, and what training around them is worth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from figures import load, table


def puzzles() -> str:
    """What searches find on puzzles: accuracy by budget, and what the largest one costs."""
    result = load("search-puzzles")
    budgets = result["settings"]["budgets"]
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for row in result["rows"]:
        found.setdefault((row["method"], row["reward"]), {})[row["n"]] = row
    rows = []
    for (method, reward), by_budget in found.items():
        last = by_budget[max(by_budget)]
        shares = [f"{by_budget[n]['accuracy']:.3f}" if n in by_budget else "" for n in budgets]
        half = f"{(last['high'] - last['low']) / 2:.3f}"
        costs = [f"{last[name]:.0f}" for name in ("tokens", "scorer_calls", "depth")]
        rows.append([f"`{method}`", reward, *shares, half, *costs])
    head = ["method", "reward", *(f"n={n}" for n in budgets), "±", "tokens", "scorer calls", "depth"]
    settings = result["settings"]
    about = (
        f"{result['rows'][0]['puzzles']} puzzles of `{settings['puzzle']}`, `{result['model']['name']}` at temperature "
        f"{settings['temperature']:g}, a pool of {settings['pool']}; ± and costs at the largest n."
    )
    return f"{about}\n\n{table(head, rows)}"


def steps(name: str) -> str:
    """What searches over steps find on puzzles, and what they gain over best-of-n at as many tokens."""
    result = load(name)
    rows = []
    for row in result["rows"]:
        even = f"{row['even']:+.3f} ({row['even_low']:+.3f} to {row['even_high']:+.3f})" if "even" in row else ""
        shown = f"{row['accuracy']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        costs = [f"{row[name]:.0f}" for name in ("tokens", "scorer_calls", "depth")]
        method = row["method"].replace("scorer={scorer},", "").replace("delimiter={delimiter},", "")
        reward = "a trained head" if row["reward"].startswith("process-reward") else row["reward"]
        rows.append([f"`{method}`", reward, str(row["n"]), shown, even, *costs])
    head = ["method", "reward", "n", "accuracy (95 %)", "over best-of-n at equal tokens (95 %)"]
    settings, model = result["settings"], result["model"]["name"].rpartition("/")[2]
    about = (
        f"{result['rows'][0]['puzzles']} puzzles of `{settings['puzzle']}`, `{model}` at temperature "
        f"{settings['temperature']:g}, a pool of {settings['pool']}."
    )
    return f"{about}\n\n{table([*head, 'tokens', 'scorer calls', 'depth'], rows)}"


def countdown() -> str:
    """What searches find where legal steps may lead nowhere: a row per search and budget, a column per reward."""
    result = load("search-countdown")
    settings, found = result["settings"], dict[tuple[str, int], dict[str, Any]]()
    for row in result["rows"]:
        found.setdefault((row["method"], row["n"]), {})[row["reward"]] = row
    rows = []
    for (method, n), by_reward in found.items():
        judged = [by_reward.get(reward) for reward in settings["rewards"]]
        one = next(iter(by_reward.values()))
        shown = [f"{each['accuracy']:.3f}" if each else "" for each in judged]
        shown = shown if any(shown) else [f"{one['accuracy']:.3f}", *[""] * (len(judged) - 1)]
        costs = [sum(each[name] for each in by_reward.values()) / len(by_reward) for name in ("tokens", "depth")]
        noisy = by_reward.get("noisy", {})
        gains = [noisy[name] for name in ("even", "even_low", "even_high") if name in noisy]
        even = "{:+.3f} ({:+.3f} to {:+.3f})".format(*gains) if gains else ""
        short = method.replace("scorer={scorer},", "").replace("delimiter={delimiter},", "")
        rows.append([f"`{short}`", str(n), *shown, even, *(f"{cost:.0f}" for cost in costs)])
    widest = max((row["high"] - row["low"]) / 2 for row in result["rows"])
    about = (
        f"{result['rows'][0]['puzzles']} puzzles of `{settings['puzzle']}`, `{result['model']['name']}` at temperature "
        f"{settings['temperature']:g}, a pool of {settings['pool']}; 95 % intervals are up to {widest:.2f} either way."
    )
    rewards = ["a trained head" if each.startswith("process-reward") else each for each in settings["rewards"]]
    head = ["method", "n", *rewards, "noisy: over best-of-n at equal tokens (95 %)", "tokens", "depth"]
    return f"{about}\n\n{table(head, rows)}"


def gsm8k() -> str:
    """What searches make of real questions, beside the vote at as many generated tokens."""
    result = load("search-gsm8k")
    found, settings = result.figures, result["settings"]
    rows = []
    for row in found["rows"]:
        method = row["method"].replace("scorer={head},", "").replace("delimiter={line},", "").replace(",rounds=12", "")
        shown = f"{row['accuracy']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})"
        even = [row["over_vote"], *row["over_vote_interval"]]
        costs = [f"{row[name]:.0f}" for name in ("tokens", "scorer_calls", "depth")]
        told = "{:+.3f} ({:+.3f} to {:+.3f})".format(*even)
        rows.append([f"`{method}`", str(row["n"] or ""), shown, told, *costs])
    learned, head = settings["learned_from"], found["head"]
    about = (
        f"{found['questions']} questions of at most {settings['calculations']} calculation, of which any text of the "
        f"pool of {settings['pool']} answered {found['answered_ever']}; {settings['dtype']}, temperature "
        f"{settings['temperature']:g}. The head learned from {learned['texts']} texts to each of "
        f"{learned['questions']} questions, {head['mean']:.1%} of them right; its AUC on held-out texts "
        f"{head['auc']:.2f}, its cross-entropy {head['cross_entropy']:.3f} where the mean alone has "
        f"{head['cross_entropy_of_the_mean']:.3f}."
    )
    harder = ", ".join(f"{right} of {texts} with {count}" for count, (right, texts) in found["harder"].items())
    columns = [
        "method",
        "n",
        "accuracy (95 %)",
        "over the vote at equal tokens (95 %)",
        "tokens",
        "scorer calls",
        "depth",
    ]
    return f"{about} Texts that are right of harder questions, by calculations: {harder}.\n\n{table(columns, rows)}"


def search_cost() -> str:
    """Passes, rows and memory of several branches beside one text."""
    result = load("search-cost")
    head = ["branches", "passes", "rows", "MiB", "MiB of the further branches' own tokens", "the rest, of one text"]
    rows = [
        [
            *(str(row[name]) for name in ("branches", "passes", "rows")),
            *(f"{row[name] / 2**20:.0f}" for name in ("bytes", "own")),
            f"{row['beyond']:.2f}",
        ]
        for row in result["rows"]
    ]
    found = table(head, rows)
    if "times" in result:
        taken = result["times"]
        ratios = taken["ratios"]
        found += (
            f"\n\n{taken['branches']} branches take {taken['median']:.2f} times as long as one text, "
            f"in the median of {len(ratios)} turns ({min(ratios):.2f} to {max(ratios):.2f})."
        )
    return found


def programs() -> str:
    """What tests are worth as scorers of programs."""
    result = load("search-programs")
    found, settings = result.figures, result["settings"]
    rows = []
    for row in found["rows"]:
        shown = [
            f"{row[name]:{sign}.3f} ({row[of][0]:{sign}.3f} to {row[of][1]:{sign}.3f})"
            for name, of, sign in (("accuracy", "interval", ""), ("over_one", "over_one_interval", "+"))
        ]
        costs = [f"{row[name]:.0f}" for name in ("tokens", "scorer_calls", "depth")]
        rows.append([f"`{row['method']}`", str(row["n"] or ""), *shown, *costs])
    about = (
        f"{found['problems']} problems, {settings['dtype']}, temperature {settings['temperature']:g}, pools of "
        f"{settings['pool']}. Of {found['texts']} samples {found['pass_examples']} pass their examples, "
        f"{found['pass_examples_and_wrong']} of these wrongly; {found['solved_ever']} problems have a right sample."
    )
    head = ["method", "n", "accuracy (95 %)", "over one sample (95 %)", "tokens", "scorer calls", "depth"]
    return f"{about}\n\n{table(head, rows)}"


def share_of(cell: dict[str, Any]) -> str:
    low, high = cell["interval"]
    return f"{cell['share']:.3f} ({low:.3f} to {high:.3f})"


def labels() -> str:
    """Reward heads by who labelled their steps."""
    result = load("search-labels")
    found, rows = result.figures, []
    for name, each in found.items():
        if isinstance(each, dict) and "labelling_tokens" in each:
            cells = [f"{each['labelling_tokens']}", f"{each['auc_of_steps']:.3f}", f"{each['auc_of_texts']:.3f}"]
            rows.append([name, *cells, share_of(each["best_of_8"]), share_of(each["weighted_vote_of_8"])])
    about = (
        f"{found['problems']} problems with {found['solutions']} solutions each; {result['settings']['prompts']} other "
        f"puzzles, of which one text solves {share_of(found['one text'])} and a vote of 8 "
        f"{share_of(found['vote of 8'])}."
    )
    head = ["labels", "tokens written for them", "AUC of steps", "AUC of texts", "best of 8", "weighted vote of 8"]
    return f"{about}\n\n{table(head, rows)}"


def grid() -> str:
    """A vote by temperature and top-p."""
    result = load("search-grid")
    cells = {tuple(name.split("/")): cell for name, cell in result.figures.items()}
    tops = list(dict.fromkeys(top for _, top in cells))
    rows = []
    for temperature in dict.fromkeys(temperature for temperature, _ in cells):
        shown = [cells[temperature, top] for top in tops]
        rows.append(
            [
                temperature,
                *(f"{c['vote']['share']:.3f} / {c['one']['share']:.3f} / {c['pass']['share']:.3f}" for c in shown),
            ]
        )
    widest = max((c["vote"]["interval"][1] - c["vote"]["interval"][0]) / 2 for c in cells.values())
    settings = result["settings"]
    about = (
        f"{settings['prompts']} puzzles of `{settings['puzzle']}`, a vote of {settings['votes']} / one text / any of "
        f"{settings['votes']} right; a vote's 95 % interval is at most {widest:.2f} either way."
    )
    return f"{about}\n\n{table(['temperature', *(f'top-p {top}' for top in tops)], rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "puzzles": puzzles,
    "steps": partial(steps, "search-steps"),
    "countdown": countdown,
    "gsm8k": gsm8k,
    "programs": programs,
    "labels": labels,
    "grid": grid,
    "search-cost": search_cost,
}

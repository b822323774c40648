"""The generated parts of the documentation about trees, rules, budgets and trained drafts, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, load_all, table

SHIPPED_COMMAND = "decodery train draft --out smollm2-draft --texts 1280 --epochs 4"


def rules() -> str:
    """How often each rule accepts one of k siblings, and the bound; a table per kind of pairs."""
    result = load("rules")
    tables = []
    for title, found in result["rows"].items():
        columns = [key for key in found if key.startswith("k=")]
        rows = [[name, *(f"{found[k][name]:.3f}" for k in columns)] for name in found[columns[0]]]
        pairs = f"{found['pairs']} pairs" + (f", draft {found['draft']}" if "draft" in found else "")
        tables.append(table([f"{title} ({pairs})", *columns], rows))
    return f"`{result['command']}`\n\n" + "\n\n".join(tables)


def judge() -> str:
    """Tokens per pass and answers by threshold of the judge."""
    result = load("judge")
    head, probe, questions = result["head"], result["probe"], result["questions"]
    rates = table(
        ["rule", "tokens per pass", "right", "answer of the model alone"],
        [
            [name, f"{row['tokens_per_pass']:.2f}", f"{row['right']:.0%}", f"{row['as_alone']:.0%}"]
            for name, row in result["rows"].items()
        ],
    )
    return (
        f"`{result['command']}`: {questions['test']} sums in words, of which the model alone gets "
        f"{result['alone']:.0%} right; drafts of `{result['draft']}`, ten tokens a pass; a head trained on "
        f"{questions['train']} other questions (AUC on those held out {head['auc']:.2f}). Of {probe['tried']} digits "
        f"replaced by wrong ones the head gives {probe['passed']} more than even odds.\n\n{rates}"
    )


def continuous() -> str:
    """What the density-ratio rule accepts, and how far the law is moved."""
    result = load("continuous")
    return f"`{result['command']}`\n\n" + table(
        ["model", "drafter's means moved by", "rule", "accepted", "values per pass", "distance"],
        [
            [
                row["model"],
                str(row["moved"]),
                row["rule"],
                f"{row['accepted']:.0%}",
                f"{row['values_per_pass']:.2f}",
                f"{row['distance']:.3f}",
            ]
            for row in result["rows"]
        ],
    )


def budgets_pareto() -> str:
    """What each budget policy throws away, and the passes it needs."""
    found = load("budgets")["pareto"]
    settings, head = found["settings"], found["settings"]["head"]
    parts = [
        f"`python benchmarks/budgets.py pareto --every {settings['every']} --tokens {settings['tokens']} --head head`, "
        f"with `{settings['draft']}` and the head of `{head['command']}`. It learned from {head['tokens']:.0f} tokens "
        f"drafted along texts new to the draft. On held-out texts, where they are accepted with a mean chance of "
        f"{head['acceptance']:.1%}, its cross-entropy above a perfect judge's is {head['loss']:.4f} nats per token; "
        f"that of the best constant is {head['constant']:.4f}."
    ]
    for name, runs in found["figures"].items():
        below = runs.pop("below", {})
        rows = [
            [family, setting, f"{point['discarded']:.2f}", f"{point['passes']:.3f}", f"{point['drafted']:.1f}"]
            for family, points in runs.items()
            for setting, point in points.items()
        ]
        counts = ", ".join(
            f"{family} {count} of {len(runs[family])}" for family, count in below.items() if family != "fixed"
        )
        columns = ["budget", "setting", "discarded per token", "passes per token", "drafted per pass"]
        title = f"{name.capitalize()}; below fixed lengths: {counts}." if counts else f"{name.capitalize()}:"
        parts.append(f"{title}\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def budgets_memory() -> str:
    """Bytes allowed and held, and tokens per pass."""
    found = load("budgets")["memory"]
    settings = found["settings"]
    columns = ["drafter", "allowed", "MiB allowed", "MiB held", "nodes", "tokens per pass"]
    rows = [
        [
            drafter,
            label,
            "" if row["allowed_mib"] is None else f"{row['allowed_mib']:.2f}",
            f"{row['peak_mib']:.2f}",
            str(row["nodes"]),
            f"{row['tokens_per_pass']:.2f}",
        ]
        for drafter, group in found["figures"].items()
        for label, row in group.items()
    ]
    command = f"python benchmarks/budgets.py memory --every {settings['every']} --tokens {settings['tokens']}"
    return f"`{command}`, with `{settings['draft']}`:\n\n{table(columns, rows)}"


def budgets_serving() -> str:
    """Mean latency by load and policy, relative to the best fixed length."""
    found = load("budgets")["serving"]
    figures = found["figures"]
    policies = list(next(iter(figures.values())))
    rows = [[load, *(f"{row[name]:.2f}" for name in policies)] for load, row in figures.items()]
    return f"`python benchmarks/budgets.py serving`\n\n{table(['load', *policies], rows)}"


def trained() -> str:
    """What the shipped draft is worth."""
    found = load("draft-trained")
    laws = [(name, found["rows"][name]) for name in ("temperature 0", "temperature 1")]
    rows = "\n".join(
        f"| {name} | {100 * law['acceptance']:.1f} % | {100 * law['agreement']:.1f} % | {law['tokens_per_pass']:.2f} |"
        for name, law in laws
    )
    times = found.get("milliseconds", {})
    cost = "".join(
        f"\n\nA pass of the {name} takes {', '.join(f'{ms:.2f} ms over {rows}' for rows, ms in by_rows.items())} rows."
        for name, by_rows in times.items()
    )
    return (
        f"Made by `{SHIPPED_COMMAND}`. On {found['questions']} questions of Spec-Bench, which it has never seen, "
        "four tokens drafted per pass:\n\n"
        f"| | acceptance | agreement | tokens per pass |\n|---|---|---|---|\n{rows}{cost}\n\n"
        "acceptance: the mean of sum min(p, q) along the text; agreement: how often both models find the same token\n"
        "most likely. `python benchmarks/draft/trained.py --timed` measures it."
    )


def growth() -> str:
    """Tokens per pass of every growth policy, a table per drafter, temperature and rule."""
    parts = []
    for result in load_all("growth-*").values():
        command = (
            f"python benchmarks/growth.py {result['drafter']} --every {result['every']} --tokens {result['tokens']}"
        )
        parts.append(f"Drafter `{result['drafter']}` (`{command}`):")
        for run, policies in result["rows"].items():
            temperature, rule = run.split()
            budgets = list(policies["chain"])
            rows = "\n".join(f"| {name} | {_cells(found, budgets)} |" for name, found in policies.items())
            parts.append(
                f"| temperature {temperature}, {rule} | {' | '.join(f'{nodes} nodes' for nodes in budgets)} |\n"
                f"|---|{'---|' * len(budgets)}\n{rows}"
            )
    return "\n\n".join(parts)


def _cells(found: dict[str, dict[str, float]], budgets: list[str]) -> str:
    known = [found.get(nodes) for nodes in budgets]
    return " | ".join(f"{each['tokens_per_pass']:.2f} ({each['acceptance']:.2f})" if each else "" for each in known)


def pruning() -> str:
    """What routing a prompt's tokens around layers costs in perplexity."""
    found = load("pruning")
    names = {"sparsity": "layers left out", "read": "text read pruned", "behind": "text after it"}
    rows = [
        [name, f"{each['sparsity']:.1%}", f"{each['read']:.1f}", f"{each['behind']:.1f}"]
        for name, each in found["rows"].items()
    ]
    made = "".join(f"; `{each['command']}`" for each in found["trained"])
    return (
        f"Perplexity on {found['texts']} passages of Spec-Bench: {found['read']} tokens read as a prompt and "
        f"{found['behind']} after it (`{found['command']}`{made}). Whole layers are left out by both.\n\n"
        + table(["", *names.values()], rows)
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "pruning": pruning,
    "growth": growth,
    "budgets-pareto": budgets_pareto,
    "budgets-memory": budgets_memory,
    "rules": rules,
    "budgets-serving": budgets_serving,
    "judge": judge,
    "continuous": continuous,
    "trained": trained,
}

"""The generated part of the documentation about cache policies, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from figures import ROOT, load, recorded, table

from decodery_benchmarks.long_context.figures import plot, tables
from decodery_benchmarks.long_context.settings import BOUNDS


def _rows() -> list[dict[str, Any]]:
    """A row for every policy and budget that was measured."""
    found = load("long-context")["rows"]
    rows = [
        {"policy": name, "budget": float(budget), **each}
        for name, budgets in found.items()
        for budget, each in budgets.items()
    ]
    return sorted(rows, key=lambda row: row["budget"])


def long_context() -> str:
    """What every policy loses, by budget."""
    # What the first passage's keys and values take in float32, after 321 tokens.
    whole = 2 * 30 * 3 * 64 * 4 * 321 / 2**20
    rows = [{"MiB held": row["resident"] * whole, "MiB read": row["read"] * whole} | row for row in _rows()]
    numbers = [row for row in rows if row["policy"].startswith("quantized")]
    exact = [row for row in rows if row["budget"] == 1 and row not in numbers and row["policy"] not in BOUNDS]
    parts = [f"`{load('long-context')['command']}`", "![What cache policies lose by budget](long-context.svg)"]
    for title, head, cells in tables([row for row in rows if row["budget"] < 1]):
        parts += [f"**{title}**", table(head, cells)]
    for _, head, cells in tables(numbers):
        parts += ["**Integers**", table(head, cells)]
    if exact:
        worst = max(row["kl"] for row in exact)
        parts.append(f"Under a budget of 1 the largest drift of {len(exact)} policies was {worst:g} nats.")
    return "\n\n".join(parts)


def picture() -> str:
    """The same over budgets, with the line of even distances and that of the oracle in every panel."""
    return plot([row for row in _rows() if not row["policy"].startswith("quantized")])


def cache_parts() -> str:
    """What trained parts know, beside parts that know nothing."""
    found = load("cache-parts")
    gates, ahead = found["gates"], ("1", "4", "12")
    shares = sorted((share for share in gates if share[0] == "0"), key=float)
    ways = ("gates", "random", "inverted")
    streams = [[way, *(f"{gates[share][way]:.3f}" for share in shares)] for way in ways]
    stored = [[way, f"{each['divergence']:.4f}"] for way, each in found["write-gate"].items()]
    thought = [[way, *(f"{found['coprocessor'][way][n]:.4f}" for n in ahead)] for way in found["coprocessor"]]
    pages = [[each, f"{share:.3f}"] for each, share in found["pages"].items()]
    tokens = found["meta-soft"]
    looks = [[way, f"{each:.3f}"] for way, each in tokens["kl"].items()]
    written = [[way, f"{each:.3f}"] for way, each in tokens["nats"].items()]
    asked = [[way, f"{mean(each):.3f}", f"{min(each):.3f}"] for way, each in found["probes"].items()]
    return "\n\n".join(
        [
            f"`{found['command']}`",
            f"*`lserve`*: nats of a solution's tokens ({gates['none']:.3f} where no head streams), by the share of "
            "heads that stream.",
            table(["heads that stream", *(f"{float(share):.0%}" for share in shares)], streams),
            "Part of the attention of the embedded model's rows (first tokens left aside) that falls on a quarter of "
            "the text, by the tokens of a page and of its parts.",
            table(["pages", "attention"], pages),
            "*`write-gate`*: divergence in nats a token where half of what is written is stored.",
            table(["what is stored", "divergence"], stored),
            "*`coprocessor`*: mean nats of the next tokens, up to so many ahead.",
            table(["latents", *ahead], thought),
            "*`meta-soft`*: divergence from what later tokens attend to, and nats of these after 0.3 of their prompt.",
            table(["what looks at the prompt", "divergence"], looks),
            table(["what is kept", "nats"], written),
            "*`actqkv`*: share of heads and layers that rank the needle's block in the best quarter, mean and least of "
            "six depths.",
            table(["weights of the question", "mean", "least"], asked),
        ]
    )


def beyond_context() -> str:
    """How well a text is predicted by stretches, beyond the context too."""
    found = load("beyond-context")
    stretches = max(len(each["perplexity"]) for each in found["rows"].values())
    ends = [found["stretch"] * (number + 1) for number in range(stretches)]
    rows = [
        ["all" if way == "none" else f"`{way}`", *(f"{each:.1f}" for each in told["perplexity"]), f"{told['held']:,}"]
        for way, told in found["rows"].items()
    ]
    head = ["what is kept", *(f"to {end:,}" for end in ends), "tokens held"]
    return f"`{found['command']}`\n\n{table(head, rows)}"


def memory_by_length() -> str:
    """What a text takes, by its length."""
    found = load("memory-by-length")
    lengths = list(dict.fromkeys(length for each in found["rows"].values() for length in each))
    rows = [
        ["all" if policy == "none" else f"`{policy}`"]
        + ["{:.0f} / {:.0f}".format(*(each / 2**20 for each in told[length])) for length in lengths]
        for policy, told in found["rows"].items()
    ]
    return f"`{found['command']}`\n\n{table(['what is kept', *(f'{int(each):,}' for each in lengths)], rows)}"


def policy_speed() -> str:
    """What policies take in memory and time, as shares of the full cache's."""
    found = load("policy-speed")
    kinds = list(found["rows"])
    names = {"auto": "float32"}
    rows = []
    for policy in found["rows"][kinds[0]]:
        told = [found["rows"][kind][policy] for kind in kinds]
        cells = [f"{each['MiB']:.0f} ({each['memory']:.2f}) | {each['ms']:.1f} ({each['time']:.2f})" for each in told]
        rows.append(
            ["all" if policy == "full" else f"`{policy}`", *(part for each in cells for part in each.split(" | "))]
        )
    head = ["what is kept"]
    for kind in kinds:
        head += [f"MiB, {names.get(kind, kind)}", f"ms a token, {names.get(kind, kind)}"]
    return f"`{found['command']}`\n\n{table(head, rows)}"


def lengths() -> str:
    """What a pass costs by the text after it, with keys and values of three sizes, and what reading alone would."""
    found = load("lengths")
    each = {(row["keys"], row["rows"], row["context"]): row["ms"] for row in found["rows"]}
    contexts, rows_read = sorted({at for _, _, at in each}), 2 * 30 * 3
    cells = []
    for keys, size in (("float32", 64 * 4), ("float16", 64 * 2), ("int8", 64 + 2)):
        first = each[keys, 1, contexts[0]]
        for rows in sorted({count for _, count, _ in each}):
            own = [each[keys, rows, at] for at in contexts]
            cells.append([keys, f"{rows}", *(f"{ms:.1f} ({ms / own[0]:.2f})" for ms in own)])
        beside = [each[keys, 8, at] / each[keys, 1, at] for at in contexts]
        cells.append([keys, "8 beside 1", *(f"{ratio:.2f}" for ratio in beside)])
        bound = [1 + size * rows_read * (at - contexts[0]) / found["reads"] / 1e6 / first for at in contexts]
        cells.append([keys, "1, reading alone", *(f"({ratio:.2f})" for ratio in bound)])
    head = ["keys and values", "rows", *(f"{at:,}" for at in contexts)]
    said = f"{found['machine']['kernels']}; it reads {found['reads']:.1f} GB/s"
    return f"`{found['command']}` ({said})\n\n{table(head, cells)}"


def prefill() -> str:
    """Seconds to the first token of a long prompt, by program."""
    found = load("prefill-peers")
    names = list(dict.fromkeys(name for told in found["rows"] for name in told))
    cells = []
    for name in names:
        rounds = [told[name] for told in found["rows"] if name in told]
        seconds, best = [each["seconds"] for each in rounds], min(each["seconds"] for each in rounds)
        said = ", ".join(f"{each:.1f}" for each in seconds)
        cells.append([name, f"{best:.1f}", f"{found['tokens'] / best:.0f}", said])
        cells[-1].append(", ".join(f"{each['others']:.1f}" if "others" in each else "" for each in rounds))
    head = ["program", "seconds, the least", "tokens a second", "all rounds", "cores that others took"]
    return f"`{found['command']}` ({found['tokens']:,} tokens)\n\n{table(head, cells)}"


def cache_recall() -> str:
    """What is left of associative recall, by budget."""
    found = load("cache-recall")
    budgets = list(next(iter(found["rows"].values())))
    modes = ("known", "unknown")
    rows = [
        [policy if policy in BOUNDS else f"`{policy}`"]
        + ["{}/{}".format(*each[budget][f"recall {mode}"]) for mode in modes for budget in budgets]
        for policy, each in found["rows"].items()
    ]
    head = ["what is kept", *(f"{mode}, {float(budget):g}" for mode in modes for budget in budgets)]
    return f"`{found['command']}`\n\n{table(head, rows)}"


def pass_lengths() -> str:
    """What a pass costs by the text after it, and how near its attention comes to what the machine can do."""
    found = {(row["rows"], row["context"]): row for row in load("parts")["rows"]}
    layers, heads, kv_heads, dim = 30, 9, 3, 64
    cells = []
    for (rows, context), row in found.items():
        if rows not in (1, 8, 64):
            continue
        attention = row["ms"] * row["attention"] / 1e3
        read = 2 * layers * kv_heads * dim * 4 * context / attention / 1e9
        products = 2 * layers * heads * dim * rows * (context + rows) / attention / 1e9
        of = row["ms"] / found[rows, min(length for _, length in found)]["ms"], row["ms"] / found[1, context]["ms"]
        figures = (f"{row['ms']:.1f}", *(f"{each:.2f}" for each in of), f"{1e3 * attention:.1f}")
        cells.append([f"{context:,}", f"{rows}", *figures, f"{read:.0f}", f"{products:.0f}"])
    head = [
        "tokens after",
        "rows",
        "ms",
        "times 128 tokens",
        "times one row",
        "attention ms",
        "GB/s",
        "products, 10^9/s",
    ]
    return f"`python benchmarks/kernels/parts.py --json benchmarks/results/parts.json`\n\n{table(head, cells)}"


def window_memory() -> str:
    """What a text takes where most layers see a window, by its length."""
    found = load("window-memory")
    ways = {"kept": "kept whole", "given back": "given back"}
    rows = [
        [
            f"{int(length):,}",
            told,
            *(f"{each[way][name] / 2**20:.0f}" for name in ("counted", "there", "there at most")),
        ]
        for length, each in found["rows"].items()
        for way, told in ways.items()
    ]
    head = ["tokens", "what no row reads", "MiB counted", "MiB in memory", "at most on the way"]
    return f"`{found['command']}`\n\n{table(head, rows)}"


def needle_grid() -> str:
    """Needles that are found by length and depth."""
    found = load("needle-grid")
    modes = {"known": "in the prompt", "unknown": "after it"}
    rows = [
        [f"{int(length):,}", name.partition(":")[0], modes[mode], *("yes" if each else "-" for each in told)]
        for length, named in found["rows"].items()
        for name, by_mode in named.items()
        for mode, told in by_mode.items()
    ]
    head = ["tokens", "policy", "question", *(f"{depth:.0%}" for depth in found["depths"])]
    return f"`{found['command']}`\n\n{table(head, rows)}"


def fewer_bits() -> str:
    """What keys and values of 16 and 8 bits cost, beside the same weights with those of 32."""
    found = load("quality-kept")
    rows = []
    for row in found["rows"]:
        weights, _, kept = row["precision"].partition("/")
        change = "{:+.2%} ({:+.2%} to {:+.2%})".format(*row["more"]) if kept else ""
        differ = f"{row['greedy_differ']} of {row['greedy_compared']}"
        rows.append([weights, kept or "float32", f"{row['perplexity']:.3f}", change, differ])
    head = ["weights", "keys and values", "perplexity", "more than with float32", "greedy tokens other than float32's"]
    return f"`{found['command']}`\n\n{table(head, rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "long-context": long_context,
    "cache-parts": cache_parts,
    "beyond-context": beyond_context,
    "memory-by-length": memory_by_length,
    **({"policy-speed": policy_speed} if recorded("policy-speed") else {}),
    "window-memory": window_memory,
    "pass-lengths": pass_lengths,
    "lengths": lengths,
    **({"prefill": prefill} if recorded("prefill-peers") else {}),
    "cache-recall": cache_recall,
    "needle-grid": needle_grid,
    "fewer-bits": fewer_bits,
}
PLOTS: dict[Path, Callable[[], str]] = {ROOT / "docs" / "results" / "long-context.svg": picture}

"""The generated part of the documentation about cache policies, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from typing import Any

from figures import load, table


def long_context() -> str:
    """What every policy loses, by budget."""
    found = load("long-context")
    parts = [f"`{found['command']}`"]
    budgets = sorted(
        {budget for policy in found["policies"].values() for budget in policy if budget != "1.0"}, key=float
    )
    known = ("needle known", "needle unknown", "lines known", "lines unknown")
    whole = ("kl", "top-1", "nll")
    head = ["", *known, *whole, "first difference", "held", "read", "tokens per pass"]
    for budget in budgets:
        rows = [_row(name, each[budget]) for name, each in found["policies"].items() if budget in each]
        parts += [f"**Budget {float(budget):g}**", table(head, rows)]
    numbers = [_row(name, each["1.0"]) for name, each in found["policies"].items() if name.startswith("quantized")]
    if numbers:
        parts += ["**Whole numbers**", table(head, numbers)]
    exact = [each["1.0"] for name, each in found["policies"].items() if "1.0" in each and "quantized" not in name]
    if exact:
        worst = max(each["kl"] for each in exact)
        parts.append(f"Under a budget of 1 the largest drift of {len(exact)} policies was {worst:g} nats.")
    return "\n\n".join(parts)


def cache_parts() -> str:
    """What trained parts know, beside parts that know nothing."""
    found = load("cache-parts")
    gates, ahead = found["gates"], ("1", "4", "12")
    shares = sorted((share for share in gates if share[0] == "0"), key=float)
    ways = ("gates", "random", "inverted")
    streams = [[way, *(f"{gates[share][way]:.3f}" for share in shares)] for way in ways]
    stored = [[way, f"{each['divergence']:.4f}"] for way, each in found["write-gate"].items()]
    thought = [[way, *(f"{found['coprocessor'][way][n]:.4f}" for n in ahead)] for way in found["coprocessor"]]
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
            "*`write-gate`*: divergence in nats a token where half of what is written is stored.",
            table(["what is stored", "divergence"], stored),
            "*`coprocessor`*: mean nats of the next tokens, up to so many ahead.",
            table(["latents", *ahead], thought),
            "*`meta-soft`*: divergence from what later tokens look at, and nats of these behind 0.3 of their prompt.",
            table(["what looks at the prompt", "divergence"], looks),
            table(["what is kept", "nats"], written),
            "*`actqkv`*: share of heads and layers that rank the needle's block in the best quarter, mean and least of "
            "six depths.",
            table(["the question asks by", "mean", "least"], asked),
        ]
    )


def _row(name: str, each: dict[str, Any]) -> list[str]:
    tasks = ("needle known", "needle unknown", "lines known", "lines unknown")
    solved = ["{}/{}".format(*each[task]) if task in each else "" for task in tasks]
    drafted = f"{each['tokens per pass']:.2f}" if "tokens per pass" in each else ""
    drift = [f"{each['kl']:.3f}", f"{each['top-1']:.2f}", f"{each['nll']:.3f}"]
    sizes = [f"{each['resident']:.2f}", f"{each['read']:.2f}"]
    return [name, *solved, *drift, f"{median(each['first difference']):g}", *sizes, drafted]


SECTIONS: dict[str, Callable[[], str]] = {"long-context": long_context, "cache-parts": cache_parts}

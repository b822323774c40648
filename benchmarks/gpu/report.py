"""The kit's table, from its results file alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

COLUMNS = ("part", "check", "outcome", "s", "what was found")


def heading(result: dict[str, Any]) -> str:
    """One line: where, when and how long."""
    machine = result["machine"] or {}
    gpus = ", ".join(machine.get("gpus", [])) or "no GPU"
    counts = Counter(row["outcome"] for row in result["rows"])
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no check was run"
    ended = "" if result["complete"] else "; cut before its end"
    return (
        f"{result['created'][:10]}, device {result['settings']['device']}, size {result['settings']['size']}, "
        f"{machine.get('processor', 'unknown processor')}, {gpus}, PyTorch {machine.get('torch', '?')}, "
        f"{result['seconds']:.0f} s: {outcomes}{ended}"
    )


def table(result: dict[str, Any]) -> str:
    """All checks, in columns."""
    rows = [(row["part"], row["check"], row["outcome"], f"{row['seconds']:.1f}", row["says"]) for row in result["rows"]]
    widths = [max(len(row[at]) for row in (*rows, COLUMNS)) for at in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    head = "  ".join([*(cell.ljust(width) for cell, width in zip(COLUMNS, widths, strict=False)), COLUMNS[4]])
    rule = "  ".join("-" * width for width in (*widths, len(COLUMNS[4])))
    aims = [f"{name}: {found} (target: {aim})" for name, found, aim in targets(result)]
    # Models of other sizes have no targets.
    more = ["", *aims] if result["settings"]["size"] == "full" else []
    return "\n".join([head, rule, *lines, *more, "", heading(result)])


def targets(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What docs/gpu.md aims at: its name, what was found, "not measured" where it was not, and the target."""
    values = {row["check"]: row["values"] for row in result["rows"] if row["part"] == "B"}

    def known(check: str, *names: str) -> float:
        found: Any = values.get(check, {})
        for name in names:
            found = found.get(name, {}) if isinstance(found, dict) else {}
        return float(found) if isinstance(found, int | float) else float("nan")

    def said(number: float, form: str) -> str:
        # A number that is none is no number at all.
        return form.format(number) if number == number else "not measured"

    def over(number: float, other: float) -> float:
        return number / other if other else float("nan")

    big, small, step = "8B", "SmolLM2-135M", "step_ms"
    one, many = (known(f"{big}: {texts}", "plain", "tokens_per_s") for texts in ("1 text", "64 texts"))
    took, kernels = (known(f"{big}: a step of 1 text", name) for name in (step, "kernel_ms"))
    floor = over(took, known(f"{big}: weights", "floor_ms"))
    peer = over(one, known(f"{big}: transformers, static cache, 1 text", "tokens_per_s"))
    found = [
        (f"{big}, a step of one text over the time to read its weights", said(floor, "{:.2f}"), "at most 1.15"),
        (f"{big}, one text beside transformers, static cache, compiled", said(peer, "{:.2f}"), "at least 1.5"),
        (f"{big}, 64 texts beside one", said(over(many, one), "{:.1f}"), "at least 40"),
        (f"{big}, share of a step of one text without a kernel", said(1 - over(kernels, took), "{:.1%}"), "at most 5%"),
    ]
    for texts, aim in (("1 text", "1,000"), ("64 texts", "40,000")):
        rate = known(f"{small}: {texts}", "plain", "tokens_per_s")
        found.append((f"{small}, tokens/s of {texts}", said(rate, "{:,.0f}"), f"at least {aim}"))
    return found

"""The generated part of the documentation about how near models come to what `transformers` says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, table


def parity() -> str:
    """Small random models of every family: differences in float32, likeness in int8, experts that are read."""
    found = load("parity")
    rows = [[name, *_cells(case)] for name, case in found["cases"].items()]
    columns = ["model", "pieces", "tree", "after a kept path", "int8: median", "int8: least", "int8 to the bit"]
    head = f"Logits beside those of `transformers` (`{found['command']}`)"
    return f"{head}\n\n{table([*columns, 'experts: a row', 'experts: nine rows'], rows)}"


def adapted() -> str:
    """Families that run through the adapter, or are refused."""
    rows = []
    for name, case in load("parity")["adapted"].items():
        cells = [f"{case[each]:.0e}" if each in case else "" for each in ("pieces", "tree", "kept")]
        rows.append([name, *cells, case.get("refused", "")])
    return table(["family", "pieces", "tree", "after a kept path", "refused"], rows)


def _cells(case: dict[str, Any]) -> list[str]:
    differences = [f"{case[name]:.0e}" for name in ("pieces", "tree", "kept")]
    experts = [str(case.get(name, "")) for name in ("experts_of_a_row", "experts_of_a_tree")]
    exact = "yes" if case["exact_rows"] else "no"
    return [*differences, f"{case['int8']:.4f}", f"{case['int8_least']:.4f}", exact, *experts]


SECTIONS: dict[str, Callable[[], str]] = {"parity": parity, "parity-adapter": adapted}

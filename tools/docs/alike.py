"""The generated part of the documentation about how near models come to what `transformers` says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from figures import load, recorded, table


def parity() -> str:
    """Small random models of every family: differences in float32, likeness in int8, experts that are read."""
    found = load("parity")
    rows = [[name, *_cells(case)] for name, case in found["cases"].items()]
    columns = ["model", "pieces", "tree", "after a kept path", "int8: median", "int8: least", "int8 to the bit"]
    head = f"Logits beside those of `transformers` (`{found['command']}`)"
    return f"{head}\n\n{table([*columns, 'experts: a row', 'experts: nine rows'], rows)}"


_SAID = {"trees": "trees", "chains": "chains", "none": "no drafts"}


def matrix() -> str:
    """Every causal class that runs: how, what is drafted for it, and how near its logits are."""
    found = load("model_matrix")
    rows = [
        [name, row["class"], row["runs"], _SAID[row["drafts"]], row["keeps"], f"{row['difference']:.0e}"]
        for name, row in found["rows"].items()
        if "difference" in row
    ]
    counts = Counter((row[2], row[3]) for row in rows)
    said = ", ".join(f"{runs} with {drafts} {n}" for (runs, drafts), n in sorted(counts.items()))
    head = f"`{found['command']}`, `transformers` {found['transformers']}. Classes by what they allow: {said}."
    return f"{head}\n\n{table(['family', 'class', 'runs', 'drafts', 'keeps', 'difference'], rows)}"


def matrix_newest() -> str:
    """What the newest `transformers` that is allowed changes."""
    old, new = load("model_matrix"), load("model_matrix-newest")
    before, after = old["rows"], new["rows"]

    def way(row: dict[str, Any]) -> str:
        return f"{row['runs']} with {_SAID[row['drafts']]}" if "drafts" in row else row["runs"]

    same = [name for name in after if name in before and way(before[name]) == way(after[name])]
    others = [
        [
            name,
            row.get("class", ""),
            way(row),
            row.get("keeps", ""),
            _off(row),
            way(before[name]) if name in before else "new",
        ]
        for name, row in after.items()
        if name not in same
    ]
    gone = [f"`{name}`" for name in before if name not in after]
    far = max(row["difference"] for row in after.values() if "difference" in row)
    right = all(row["greedy"] for row in after.values() if "greedy" in row)
    parts = [f"{len(same)} of {len(after)} classes run the same way", f"greatest difference {far:.0e}"]
    parts += ["every greedy text is that of plain calls"] if right else ["some greedy texts differ"]
    parts += [f"gone: {', '.join(gone)}"] if gone else []
    head = f"`{new['command']}`, `transformers` {new['transformers']}: {'; '.join(parts)}."
    if not others:
        return head
    columns = ["family", "class", "runs", "keeps", "difference", f"with {old['transformers']}"]
    return f"{head} The others:\n\n{table(columns, others)}"


def _off(row: dict[str, Any]) -> str:
    """The difference of a class that runs, or why it does not."""
    return f"{row['difference']:.0e}" if "difference" in row else row["reason"]


def matrix_refused() -> str:
    """Every causal class that is refused, with the reason, and those that no small configuration makes."""
    found = load("model_matrix")["rows"]
    rows = [[name, row["class"], row["reason"]] for name, row in found.items() if row["runs"] == "refused"]
    rest = ", ".join(f"`{name}`" for name, row in found.items() if row["runs"] == "not built")
    return (
        f"{table(['family', 'class', 'reason'], rows)}\n\nNot tried, because no small configuration makes one: {rest}."
    )


def _cells(case: dict[str, Any]) -> list[str]:
    differences = [f"{case[name]:.0e}" for name in ("pieces", "tree", "kept")]
    experts = [str(case.get(name, "")) for name in ("experts_of_a_row", "experts_of_a_tree")]
    exact = "yes" if case["exact_rows"] else "no"
    return [*differences, f"{case['int8']:.4f}", f"{case['int8_least']:.4f}", exact, *experts]


SECTIONS: dict[str, Callable[[], str]] = {
    "parity": parity,
    "model-matrix": matrix,
    "model-matrix-refused": matrix_refused,
    **({"model-matrix-newest": matrix_newest} if recorded("model_matrix-newest") else {}),
}

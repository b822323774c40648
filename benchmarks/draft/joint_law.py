"""The law of two amounts, from the sweeps that were measured over one of them each.

    python benchmarks/draft/joint_law.py

Both sweeps of benchmarks/draft/sweep_drafts.py share a draft: the one that stands in the middle of each. What is known
of it is what differs in the other sweep, so that every draft has tokens that it learned from and weights. Writes
benchmarks/results/draft-sweep-both.json; nothing is measured again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import LAW, read_result, write_result
from decodery_benchmarks.scaling import joint_report

RESULTS = Path(__file__).parents[1] / "results"


def sweep(axis: str) -> dict[float, float]:
    """Tokens per pass by amount."""
    found = read_result(RESULTS / f"draft-sweep-{axis}.json")
    return dict(zip(found["amounts"], found["values"], strict=True))


def main() -> None:
    data, size = sweep("data"), sweep("size")
    shared = [(tokens, weights) for tokens, at in data.items() for weights, also in size.items() if at == also]
    if len(shared) != 1:
        raise SystemExit("the sweeps over data and size share no draft: measure both with sweep_drafts.py")
    ((tokens, weights),) = shared
    measured = {(each, weights): value for each, value in data.items()}
    measured |= {(tokens, each): value for each, value in size.items()}
    found: dict[str, Any] = {
        "command": "python benchmarks/draft/joint_law.py",
        "amounts_are": ["tokens learned from", "weights"],
        "values_are": "tokens per pass of the target",
        **joint_report(list(measured), list(measured.values())),
    }
    write_result(RESULTS / "draft-sweep-both.json", found, summary=LAW)
    print(json.dumps({name: found[name] for name in ("slopes", "slope_intervals", "r2", "next")}))
    for each in found["foretold"]:
        print(json.dumps(each))


if __name__ == "__main__":
    main()

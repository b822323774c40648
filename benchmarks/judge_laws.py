"""What a judge makes of k samples where everything is Gaussian: the laws beside draws, as a share of one sample's loss.

    python benchmarks/judge_laws.py [--draws 8000] [--out benchmarks/results]

Samples are N(b, 1), the right answer is 0, and the judge likes what is near c. Writes search-judge-laws.json; some ten
seconds, nothing is timed.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from decodery_benchmarks.judge_theory import best_of_k, chosen, many_samples, one_sample, warm_judge
from decodery_benchmarks.results import write_result

CASES = {"a judge that knows": (0.5, 0.0), "a judge that errs": (1.0, -0.7), "a judge that misleads": (1.0, 2.0)}
COLD, LUKEWARM, WARM = 0.0, 1.0, 25.0
WIDTHS = [1 << power for power in range(9)]


def law(b: float, c: float, temperature: float, k: int) -> float | None:
    """The loss by its closed form; None where there is none at this temperature but for many samples."""
    if temperature == COLD:
        return best_of_k(b, c, 1.0, k)
    if temperature == WARM:
        return warm_judge(b, c, 1.0, temperature, k)
    return many_samples(b, c, 1.0, temperature) if k == WIDTHS[-1] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (b, c) in CASES.items():
        alone = one_sample(b, 1.0)
        for temperature in (COLD, LUKEWARM, WARM):
            for k in WIDTHS:
                samples = np.random.default_rng([k, int(temperature)]).normal(b, 1.0, (options.draws, k))
                losses = chosen(samples, c, temperature, seed=k) ** 2 / alone
                told = law(b, c, temperature, k)
                rows.append(
                    {
                        "case": name,
                        "temperature": temperature,
                        "k": k,
                        "measured": round(float(losses.mean()), 4),
                        "error": round(float(losses.std() / math.sqrt(options.draws)), 4),
                        "law": None if told is None else round(told / alone, 4),
                    }
                )
    result = {
        "settings": {"draws": options.draws, "cases": CASES},
        "rows": rows,
        "command": "python benchmarks/judge_laws.py",
    }
    write_result(options.out / "search-judge-laws.json", result)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()

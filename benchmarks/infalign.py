"""What the transforms of InfAlign win by the best of n at the same distance from the untrained model, in closed form.

    python benchmarks/infalign.py [--out benchmarks/results]

A policy is a density over calibrated rewards, which are uniform under the model itself, so that nothing is drawn: every
figure is an integral over 2,000 places. Writes search-infalign.json; half a minute, nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from decodery.scorers.infalign import transform, win_rate
from decodery_benchmarks.results import write_result

WIDTHS, DISTANCES = (1, 4, 16), (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)
_HALVINGS, _LEAST, _MOST = 22, 0.02, 500.0

Density = np.ndarray


def tilted(rewards: np.ndarray) -> Density:
    """The policy whose law is the model's times exp of these rewards."""
    found: np.ndarray = np.exp(rewards - rewards.max())
    return found / found.mean()


def away(density: Density) -> float:
    """KL from the untrained model, in nats."""
    return float((density * np.log(np.maximum(density, 1e-300))).mean())


def at(distance: float, policy: Callable[[float], Density], low: float, high: float) -> Density:
    """The policy that is so far away, which it is the farther the larger its strength."""
    for _ in range(_HALVINGS):
        # Strengths differ by orders of magnitude.
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if away(policy(middle)) < distance else (low, middle)
    return policy(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    grid, _, _ = transform(1, 1.0)
    rows = []
    for n in WIDTHS:
        kinds: dict[str, tuple[Callable[[float], Density], float, float]] = {
            "identity": (lambda strength: tilted(strength * grid), 1e-3, 1e4),
            "exp, t = 5": (lambda strength: tilted(strength * np.exp(5 * (grid - 1))), 1e-3, 1e4),
            "exp, t = 10": (lambda strength: tilted(strength * np.exp(10 * (grid - 1))), 1e-3, 1e4),
            "exact": (lambda strength, n=n: transform(n, 1 / strength)[2], _LEAST, _MOST),
        }
        for kind, (policy, low, high) in kinds.items():
            for distance in DISTANCES:
                found = at(distance, policy, low, high)
                told = {"n": n, "transform": kind, "kl": round(away(found), 4), "asked": distance}
                rows.append(told | {"win_rate": round(win_rate(found, n), 4)})
    result = {"settings": {"widths": WIDTHS, "distances": DISTANCES}, "rows": rows}
    write_result(options.out / "search-infalign.json", result | {"command": "python benchmarks/infalign.py"})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()

"""The density-ratio rule on small models of continuous values: how much is accepted, and how far the law is moved.

    python benchmarks/continuous.py [--out benchmarks/results]

Targets are chains of Gaussian mixtures known in closed form; a drafter is the target with moved means. Diffusion heads
of ten steps draw from about the same mixtures; with them the rule is a surrogate. The distance is that of Kolmogorov
and Smirnov between the first values of 4,000 runs and 4,000 plain draws; laws that are equal are about 0.02 apart, and
seldom more than 0.036. Nothing is timed. Writes continuous.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import ks_2samp

from decodery.engine.continuous import ContinuousModel, generate_values
from decodery.speculative.acceptance.continuous.density_ratio import Density, DensityRatio
from decodery.testing.continuous import DiffusionChain, MixtureChain
from decodery_benchmarks.results import write_result

RUNS, LENGTH, GAMMA = 4000, 400, 4


@dataclass(frozen=True)
class OwnNoise(DensityRatio):
    """The surrogate without aligned trajectories: the target's has noise of its own."""

    def _pair(self, p: Density, q: Density, seed: int, position: int) -> tuple[Density, Density]:
        return super()._pair(p, q, seed + 10**9, position)[0], super()._pair(p, q, seed, position)[1]


def figures(target: ContinuousModel, drafter: ContinuousModel, size: int, rule: DensityRatio) -> dict[str, float]:
    run = generate_values(target, LENGTH, size, drafter=drafter, gamma=GAMMA, acceptance_rule=rule)
    drafted = {"drafter": drafter, "gamma": 1, "alone": 0, "acceptance_rule": rule}
    first = np.array([generate_values(target, 2, size, seed=seed, **drafted).values[0, 0] for seed in range(RUNS)])
    plain = [generate_values(target, 1, size, seed=seed).values[0, 0] for seed in range(RUNS, 2 * RUNS)]
    return {
        "accepted": round(run.accepted / run.drafted, 4),
        "values_per_pass": round(run.values_per_pass, 3),
        "distance": round(float(ks_2samp(first, plain).statistic), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    rows = []
    for size in (1, 4):
        target = MixtureChain.random(size, 2, seed=1)
        for moved in (0.2, 0.5, 1.0):
            drafter = target.nearby(moved, seed=2)
            exact = {"model": f"mixture, d = {size}", "moved": moved, "rule": "density-ratio"}
            rows.append(exact | figures(target, drafter, size, DensityRatio()))
            heads = DiffusionChain(target), DiffusionChain(drafter)
            for name, rule in (("shared noise", DensityRatio(surrogate=True)), ("own noise", OwnNoise(surrogate=True))):
                lossy = {"model": f"diffusion head, d = {size}", "moved": moved, "rule": f"surrogate, {name}"}
                rows.append(lossy | figures(*heads, size, rule))
            print(json.dumps(rows[-3:], indent=1), flush=True)
    result = {
        "command": "python benchmarks/continuous.py",
        "runs": RUNS,
        "length": LENGTH,
        "gamma": GAMMA,
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_result(out / "continuous.json", result)


if __name__ == "__main__":
    main()

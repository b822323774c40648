"""Which layers of `archon` are best for a task within a number of texts, by trying some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.gaussian_process import GaussianProcess
from decodery.models.loaders.store import Progress, silent

from .archon import Archon, Layers

__all__ = ["Tried", "best_archons"]

SPACE: dict[str, tuple[int, ...]] = {
    "samples": tuple(range(1, 11)),
    "tests": (0, 1),
    "verifier": (0, 1),
    "critic": (0, 1),
    "kept": (0, 1, 3, 5),
    "fusing": (0, 1, 2),
    "fusers": (1, 2, 4),
}
"""What is chosen: texts of the generator; whether they are tested, verified, criticised; how many a ranker keeps, 0 for
no ranker; layers of fusers, and fusers in each, after which one more fuser makes one text of several."""
_FIRST, _KAPPA = 8, 2.0


@dataclass(frozen=True)
class Tried:
    """A pipeline and what it scored."""

    search: Archon
    score: float


def best_archons(
    score: Callable[[Archon], float],
    *,
    most_calls: int = 30,
    evaluations: int = 60,
    how: Literal["bayesian", "greedy", "random"] = "bayesian",
    seed: int = 0,
    progress: Progress = silent,
) -> list[Tried]:
    """Try pipelines of one model that ask for at most `most_calls` texts.

    Archon: An Architecture Search Framework for Inference-Time Techniques (2024), which also chooses among models;
    score the best few again on more questions.

    Args:
        score: Of a pipeline, higher is better, such as the share of questions of a sample that it answers rightly;
            asked `evaluations` times at most, never twice for the same layers.
        how: "bayesian" tries what a Gaussian process over `SPACE` has the highest upper bound for, "greedy" improves
            one choice after the other from the smallest pipeline on, "random" draws.

    Returns:
        All that were tried, best first.

    Raises:
        SettingsError: If nothing is cheap enough.
    """
    if how not in ("bayesian", "greedy", "random"):
        raise SettingsError(f"pipelines are looked for bayesian, greedy or random, not {how!r}")
    space = _space(most_calls)
    if not space:
        raise SettingsError(f"no pipeline of archon needs {most_calls} texts at most: allow more")
    random, tried = np.random.default_rng(seed), dict[Layers, float]()

    def ask(layers: Layers) -> float:
        if layers not in tried:
            tried[layers] = float(score(Archon(layers)))
            progress("trying pipelines", len(tried), min(evaluations, len(space)))
        return tried[layers]

    if how == "greedy":
        _climb(ask, most_calls, lambda: len(tried) >= evaluations)
    else:
        names, points = list(space), np.array(list(space.values()))
        order = random.permutation(len(names))
        for number in range(min(evaluations, len(names))):
            if how == "random" or number < _FIRST:
                chosen = next(place for place in order if names[place] not in tried)
            else:
                known = np.array([space[layers] for layers in tried])
                upper = GaussianProcess(known, np.array(list(tried.values()))).upper(points, _KAPPA)
                upper[[layers in tried for layers in names]] = -np.inf
                chosen = int(upper.argmax())
            ask(names[chosen])
    return sorted((Tried(Archon(layers), found) for layers, found in tried.items()), key=lambda each: -each.score)


def _climb(ask: Callable[[Layers], float], most_calls: int, over: Callable[[], bool]) -> None:
    """Improve one choice after the other, from the smallest pipeline on, until none gets better."""
    best = {name: values[0] for name, values in SPACE.items()}
    top, better = ask(_layers(**best)), True
    while better and not over():
        better = False
        for name, values in SPACE.items():
            for value in values:
                layers = _layers(**best | {name: value})
                if over() or Archon(layers).cost() > most_calls:
                    continue
                if (found := ask(layers)) > top:
                    best, top, better = best | {name: value}, found, True


@lru_cache(maxsize=4)
def _space(most_calls: int) -> dict[Layers, tuple[float, ...]]:
    """All pipelines that are cheap enough, each once, and where they stand in a cube: each choice from 0 to 1."""
    found: dict[Layers, tuple[float, ...]] = {}
    for chosen in product(*SPACE.values()):
        layers = _layers(**dict(zip(SPACE, chosen, strict=True)))
        if layers not in found and Archon(layers).cost() <= most_calls:
            places = zip(SPACE.values(), chosen, strict=True)
            found[layers] = tuple(values.index(each) / (len(values) - 1) for values, each in places)
    return found


def _layers(samples: int, tests: int, verifier: int, critic: int, kept: int, fusing: int, fusers: int) -> Layers:
    critics = [("critic",)] if critic else []
    found: list[tuple[str, ...]] = [(f"generator(n={samples})",)]
    if tests:
        found += [("unit-tests",), ("evaluator",)]
    if verifier:
        found += [("verifier",)]
    if kept:
        found += [*critics, (f"ranker(top_k={kept})",)]
    for _ in range(fusing):
        found += [*critics, (f"fuser(n={fusers})",)]
    if fusing and fusers > 1:
        found += [*critics, ("fuser",)]
    return tuple(found)

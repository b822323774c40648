"""DySpec against the algorithm that adds one node at a time."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.trees.dyspec import DySpec
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.draft_length_policy import Budget
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from grown_trees import GREEDY, WARM, Drawing, begun, law_after, noise_after, paths

SAMPLERS = {"greedy": GREEDY, "warm": WARM}


def one_by_one(
    drafter: TreeDrafter, seq: Sequence, nodes: int, depth: int
) -> tuple[list[tuple[int, ...]], list[float]]:
    """DySpec's pseudo-code: a residual per node, the place worth most is drawn from, one draft pass per node."""
    residual: dict[tuple[int, ...], np.ndarray] = {}

    def opened(path: tuple[int, ...]) -> None:
        law = law_after(drafter, seq, path)
        if seq.request.sampler.greedy:
            law = law / 0.6 - np.logaddexp.reduce(law / 0.6)
        residual[path] = np.exp(law)

    opened(())
    places, drawn, worths, pushed = [(1.0, 0, ())], [], [], 1
    while places and len(drawn) < nodes:
        place = max(places, key=lambda each: (each[0], -each[1]))
        places.remove(place)
        value, _, path = place
        law = residual[path]
        with np.errstate(divide="ignore"):
            scores = np.log(law) + (0.0 if seq.request.sampler.greedy else noise_after(seq, path))
        token = int(scores.argmax())
        drawn.append((*path, token))
        worths.append(value)
        if len(path) + 1 < depth:
            opened((*path, token))
            places.append((value * law[token], pushed, (*path, token)))
        if law[token] < 1 - 1e-9:
            places.append((value * (1 - law[token]), pushed + 1, path))
            law = law.copy()
            law[token] = 0.0
            residual[path] = law / law.sum()
        pushed += 2
    return drawn, worths


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("rule", [Coupled(), Drawing()], ids=["request's noise", "own noise"])
def test_dyspec_grows_the_tree_of_the_one_by_one_algorithm(sampler: str, rule: AcceptanceRule) -> None:
    for seed in range(12):
        drafter, seq = begun(DySpec(nodes=3 + 2 * seed), SAMPLERS[sampler], rule=rule, seed=seed)
        tree = run_sync(drafter.propose(seq, Budget(64, 4)))
        expected, worths = one_by_one(drafter, seq, 3 + 2 * seed, 4)
        assert paths(tree) == expected
        assert (np.diff(worths) <= 1e-12).all()


def test_dyspecs_places_are_worth_most_together() -> None:
    for seed in range(4):
        drafter, seq = begun(DySpec(nodes=5), seed=seed, vocab=3)
        tape, worths = one_by_one(drafter, seq, 39, 3)  # every place there is, in an order of closed sets
        known = dict(zip(tape, worths, strict=True))
        first: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for path in tape:
            first.setdefault(path[:-1], []).append(path)

        def requirements(path: tuple[int, ...], siblings: dict = first) -> list[tuple[int, ...]]:
            """What must be drawn before it."""
            row = siblings[path[:-1]]
            before = row[: row.index(path)][-1:]
            return before + ([path[:-1]] if len(path) > 1 else [])

        best = max(
            sum(known[path] for path in chosen)
            for chosen in combinations(tape[:16], 5)
            if all(need in chosen for path in chosen for need in requirements(path))
        )
        got = sum(known[path] for path in paths(run_sync(drafter.propose(seq, Budget(64, 3)))))
        assert got == pytest.approx(best)


def test_the_threshold_decides_before_the_draw() -> None:
    for seed in range(8):
        threshold = 0.02 + 0.03 * seed
        drafter, seq = begun(DySpec(nodes=64, threshold=threshold), seed=seed)
        expected: list[tuple[int, ...]] = []
        frontier = [((), 1.0)]
        while frontier:
            following = []
            for path, value in frontier:
                law, left = np.exp(law_after(drafter, seq, path)), 1.0
                order = iter(np.argsort(-(np.log(law) + noise_after(seq, path))).tolist())
                while value * left > threshold + 1e-12 and (token := next(order, None)) is not None:
                    following.append(((*path, token), value * law[token]))
                    left -= law[token]
            expected += [path for path, _ in following]
            frontier = [each for each in following if len(each[0]) < 5]
        assert paths(run_sync(drafter.propose(seq, Budget(64, 5)))) == expected[:64]

"""Sequoia against every tree there is, what it expects against walks, and the acceptance it is told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.core.trace import Step, Trace
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.tree_building.template import Template
from decodery.speculative.trees.fixed_tree import FixedTree
from decodery.speculative.trees.sequoia import Optimum, acceptance_by_rank, best_tree, fastest_tree
from decodery.testing import TableModel, decode


def every_tree(nodes: int, levels: int, width: int) -> Iterator[dict[tuple[int, ...], int]]:
    """All shapes of exactly `nodes` nodes below the root, as counts of children."""
    if nodes == 0:
        yield {}
        return
    if levels == 0:
        return
    for children in range(1, min(width, nodes) + 1):
        yield from ({(): children} | below for below in _forests(nodes - children, children, 0, levels - 1, width))


def _forests(spare: int, children: int, rank: int, levels: int, width: int) -> Iterator[dict[tuple[int, ...], int]]:
    if rank == children:
        if spare == 0:
            yield {}
        return
    for taken in range(spare + 1):
        for one in every_tree(taken, levels, width):
            moved = {(rank, *path): count for path, count in one.items()}
            for others in _forests(spare - taken, children, rank + 1, levels, width):
                yield moved | others


def worth(template: Template, acceptance: tuple[float, ...]) -> float:
    reached = np.ones(len(template.parents))
    for place in range(1, len(reached)):
        reached[place] = reached[template.parents[place]] * acceptance[template.ranks[place]]
    return float(reached.sum())


@pytest.mark.parametrize("acceptance", [(0.6, 0.2, 0.1), (0.3, 0.3, 0.3, 0.05), (0.9,), (0.5, 0.45)])
def test_sequoias_trees_are_the_best_there_are(acceptance: tuple[float, ...]) -> None:
    for levels in (1, 2, 3, 6):
        optimum = Optimum(acceptance, 6, levels)
        for nodes in range(7):
            shapes = [Template(counts) for counts in every_tree(nodes, levels, len(acceptance))] if nodes else []
            best = max((worth(shape, acceptance) for shape in shapes), default=1.0 if nodes == 0 else -np.inf)
            assert optimum.expected[levels, nodes + 1] == pytest.approx(best, abs=1e-12)
            if nodes and shapes:
                found = optimum.template(levels, nodes + 1)
                assert len(found) == nodes and found.depths.max() <= levels
                assert worth(found, acceptance) == pytest.approx(best, abs=1e-12)


def test_sequoia_expects_what_walks_through_its_tree_emit() -> None:
    acceptance = (0.6, 0.2, 0.1)
    tree, random = best_tree(acceptance, 20, 8), np.random.default_rng(0)
    emitted = 0
    for _ in range(4000):
        node = 0
        while True:
            emitted += 1
            rank = int(np.searchsorted(np.cumsum(acceptance), random.random(), side="right"))
            below = np.flatnonzero((tree.parents == node) & (tree.ranks == rank))
            if not len(below):
                break
            node = int(below[0])
    assert emitted / 4000 == pytest.approx(worth(tree, acceptance), rel=0.03)


def test_sequoia_weighs_what_passes_cost() -> None:
    acceptance = (0.6, 0.2, 0.1)
    flat, steep = (1.0,) * 70, tuple(float(rows) for rows in range(70))
    assert len(fastest_tree(acceptance, 60, 8, 0.0, flat)) == 60
    assert len(fastest_tree(acceptance, 60, 8, 0.0, steep)) == 0
    deep, shallow = (fastest_tree(acceptance, 60, 8, cost, flat) for cost in (0.01, 1.0))
    assert deep.depths.max() > shallow.depths.max()
    candidates = [
        (worth(Template(counts), acceptance) / (levels * 0.3 + 1.0 + 0.05 * (nodes + 1)), counts)
        for nodes in range(1, 6)
        for levels in range(1, 4)
        for counts in every_tree(nodes, levels, 3)
    ]
    rising = tuple(1.0 + 0.05 * rows for rows in range(7))
    found = fastest_tree(acceptance, 5, 3, 0.3, rising)
    speed = worth(found, acceptance) / (found.depths.max() * 0.3 + rising[len(found) + 1])
    assert speed == pytest.approx(max(speed for speed, _ in candidates))
    # Through the loop, whose pass times are even here: the deepest tree pays.
    drafter = DraftModel(TableModel(6, seed=3), tree_policy="sequoia(nodes=9,draft_cost=0.0)")
    assert drafter.requirements.costs
    (run,) = decode(TableModel(6, seed=3), [[1, 2]], drafter=drafter, max_new_tokens=20)
    assert {step.nodes for step in run.trace.decoding[:2]} == {9}


def test_acceptance_is_measured_from_traces() -> None:
    trace = Trace()
    for choices in ([(0, 3), (1, 3), (-1, 1)], [(0, 2)], [(2, 3)]):
        trace.steps.append(Step(3, 1, 2, 4, False, 0, 0, 0, 0, choices=choices))
    assert acceptance_by_rank([trace], width=4) == pytest.approx((2 / 5, 1 / 4, 1 / 4))
    trace.steps.append(Step(3, 1, 2, 4, True, 0, 0, 0, 0, choices=[(0, 3)] * 9))  # a prefill pass does not count
    assert acceptance_by_rank([trace], width=2)[0] == pytest.approx(2 / 5)
    with pytest.raises(SettingsError, match="no draft was accepted"):
        acceptance_by_rank([Trace()])


def test_traces_tell_which_child_was_accepted() -> None:
    model = TableModel(4, seed=5)
    (plain,) = decode(model, [[1, 2]], max_new_tokens=30)
    drafter = DraftModel(TableModel(4, seed=8), tree_policy=FixedTree(branching=(3, 2)))
    (run,) = decode(model, [[1, 2]], drafter=drafter, max_new_tokens=30)
    assert run.generated == plain.generated
    ranks = [rank for step in run.trace.decoding for rank, _ in step.choices]
    assert sum(rank >= 0 for rank in ranks) == sum(step.accepted for step in run.trace.decoding)
    assert {0, 1, -1} <= set(ranks)
    assert {offered for step in run.trace.decoding[:3] for _, offered in step.choices} <= {3, 2}

"""A tree whose shape is given: children by rank, the same places at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing
from ..tree_building.template import MOST, Template, calibrated, constant

EAGLE = Template(
    {
        (): 4,
        **{(0,): 3, (1,): 2, (2,): 2, (3,): 1},
        **{(0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1},
        **{(0, 0, 0): 3, (0, 0, 0, 0): 2},
    }
)
"""The published tree of EAGLE: 25 nodes, 4 / 8 / 8 / 3 / 2 per depth."""


@register(
    "fixed-tree",
    paper="EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (2024)",
    guarantee="the output distribution is unchanged; siblings are deterministic, which every rule verifies",
    lossless=True,
)
@dataclass(frozen=True)
class FixedTree(TreePolicy):
    """Fills a tree of a given shape with the drafter's most likely tokens, a pass per level.

    Without any of them it is done by the rates the drafter comes with, as a trained head does; one that has none fills
    the 25 nodes of EAGLE's tree. Where the budget is smaller than a given shape, the places most likely to be right are
    filled, rank r counting as right once in (r + 1)(r + 2) times.

    Attributes:
        branching: Children of every node by depth, as 4/2/1 for 4 + 8 + 8 nodes.
        paths: In place of it, the rank paths of all nodes, as 0/1/0:0 for the two most likely tokens and the most
            likely one after the first.
        rates: In place of both, how often the guess of each rank is right, by depth, as 0.6:0.1/0.4:0.1; the `nodes`
            places most likely to be right are filled, as Medusa finds its tree.
        nodes: Nodes of a tree that is shaped by `rates`.
    """

    branching: tuple[int, ...] | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    rates: tuple[tuple[float, ...], ...] | None = None
    nodes: int = 63

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.branching, self.paths, self.rates)) > 1:
            raise SettingsError("fixed-tree takes one of branching, paths and rates")
        if self.nodes < 1:
            raise SettingsError("fixed-tree needs nodes >= 1")
        if self.rates is not None and not (
            self.rates and all(ranks and all(0 <= rate <= 1 for rate in ranks) for ranks in self.rates)
        ):
            raise SettingsError("fixed-tree needs rates from 0 to 1, at least one per depth, as in rates=0.6:0.1/0.4")
        _shape(self.branching, self.paths)

    def largest(self) -> int:
        given = self.branching is not None or self.paths is not None
        return len(_shape(self.branching, self.paths)) if given else max(self.nodes, len(EAGLE))

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        shape = _shape(self.branching, self.paths).within(budget.nodes, budget.depth)
        if self.branching is None and self.paths is None and (rates := self.rates or expander.rates):
            shape = calibrated(rates, min(self.nodes, budget.nodes), budget.depth)
        return (yield from Growing(expander, seq, budget, self.origin).fill(shape))


@lru_cache(maxsize=64)
def _shape(branching: tuple[int, ...] | None, paths: tuple[tuple[int, ...], ...] | None) -> Template:
    if branching is not None:
        return constant("fixed-tree", branching)
    if paths is None:
        return EAGLE
    given = set(paths)
    counts: dict[tuple[int, ...], int] = {}
    for path in given:
        if not path or min(path) < 0:
            raise SettingsError("fixed-tree needs rank paths of ranks from 0 on, as in paths=0/1/0:0")
        if (path[:-1] and path[:-1] not in given) or (path[-1] and (*path[:-1], path[-1] - 1) not in given):
            named = ":".join(map(str, path))
            raise SettingsError(f"fixed-tree: the path {named} needs its parent and the ranks before it")
        counts[path[:-1]] = max(counts.get(path[:-1], 0), path[-1] + 1)
    if not 0 < len(given) <= MOST:
        raise SettingsError(f"fixed-tree shapes have between 1 and {MOST} nodes")
    return Template(counts)

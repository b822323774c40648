"""Sequoia: the tree that is best for acceptance rates by rank, found by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.core.trace import Trace
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing
from ..tree_building.template import Template

MEASURED = (0.196, 0.079, 0.056, 0.03, 0.022, 0.015, 0.015, 0.011, 0.01, 0.008, 0.005, 0.002)
"""Of the draft that comes with the embedded model, at temperature 0, on Spec-Bench: what
`python benchmarks/growth.py draft-model --acceptance --every 8` prints."""


def acceptance_by_rank(traces: Iterable[Trace], width: int = 32) -> tuple[float, ...]:
    """`acceptance`: how often the child of each rank was the accepted one, where it existed.

    Ranks at which nothing was accepted end the vector, and later ranks count as no better than earlier ones.

    Args:
        traces: Of runs whose nodes had up to `width` children, such as those of "rsd-c:branching=16".

    Raises:
        SettingsError: If nothing was accepted at all.
    """
    choices = [choice for trace in traces for step in trace.decoding for choice in step.choices]
    accepted, offered = np.zeros(width), np.zeros(width)
    for rank, children in choices:
        offered[:children] += 1
        if 0 <= rank < width:
            accepted[rank] += 1
    rates = np.minimum.accumulate(accepted / np.maximum(offered, 1))
    if not rates[0] > 0:
        raise SettingsError("no draft was accepted in these traces, so there is nothing to measure; decode more tokens")
    return tuple(rates[rates > 0].tolist())


class Optimum:
    """Best trees for an acceptance vector.

    expected[d, m] is the most that a tree of exactly m nodes (the root counted) and at most d levels below the root is
    worth, where child number b of every node is accepted with probability `acceptance[b]`; -inf where there is none.
    Time: nodes squared by width by levels.

    Args:
        expected: [levels + 1, nodes + 2] tokens a step emits, by depth and nodes.
    """

    def __init__(self, acceptance: tuple[float, ...], nodes: int, levels: int) -> None:
        size = nodes + 2
        alone = np.full(size, -np.inf)
        alone[1] = 1.0
        rest = np.arange(size)[:, None] - np.arange(size)[None, :]  # of m nodes, y for the root and its first children
        self.expected = np.full((levels + 1, size), -np.inf)
        self.expected[0] = alone
        self._widths: list[np.ndarray] = []
        self._splits: list[np.ndarray] = []
        for level in range(1, levels + 1):
            below = np.where(rest > 0, self.expected[level - 1][np.maximum(rest, 0)], -np.inf)
            worth, splits = [alone], []
            for rate in acceptance[:nodes]:
                total = worth[-1][None, :] + rate * below
                splits.append(total.argmax(axis=1))
                worth.append(total.max(axis=1))
            self._widths.append(np.argmax(worth, axis=0))
            self._splits.append(np.stack(splits))
            self.expected[level] = np.max(worth, axis=0)

    def template(self, levels: int, nodes: int) -> Template:
        """The best tree of `nodes` nodes, the root counted, and at most `levels` levels below it."""
        counts: dict[tuple[int, ...], int] = {}
        open_: list[tuple[tuple[int, ...], int, int]] = [((), levels, nodes)]
        while open_:
            path, level, size = open_.pop()
            if size == 1:
                continue
            counts[path] = width = int(self._widths[level - 1][size])
            for rank in reversed(range(width)):
                before = int(self._splits[level - 1][rank, size])
                open_.append(((*path, rank), level - 1, size - before))
                size = before
        return Template(counts)


@lru_cache(maxsize=64)
def best_tree(acceptance: tuple[float, ...], nodes: int, levels: int) -> Template:
    """The tree of up to `nodes` nodes below the root and `levels` levels that emits most tokens per step."""
    optimum = Optimum(acceptance, nodes, levels)
    return optimum.template(levels, int(optimum.expected[levels].argmax()))


@lru_cache(maxsize=64)
def fastest_tree(
    acceptance: tuple[float, ...], nodes: int, levels: int, draft_seconds: float, pass_seconds: tuple[float, ...]
) -> Template:
    """The tree within these bounds that emits most tokens per second.

    Args:
        draft_seconds: Of a draft pass, one per level.
        pass_seconds: Of a target pass over 0, 1, 2, ... rows.
    """
    optimum = Optimum(acceptance, nodes, levels)
    size = min(nodes + 2, len(pass_seconds))
    seconds = np.arange(levels + 1)[:, None] * draft_seconds + np.array(pass_seconds[:size])[None, :]
    speed = optimum.expected[:, :size] / np.maximum(seconds, 1e-12)
    speed[:, 0] = -np.inf
    level, rows = np.unravel_index(int(speed.argmax()), speed.shape)
    return optimum.template(int(level), int(rows))


@register(
    "sequoia",
    paper="Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (2024)",
    guarantee="the output distribution is unchanged; siblings are draws without replacement",
    lossless=True,
)
@dataclass(frozen=True)
class Sequoia(TreePolicy):
    """Fills the tree of most tokens per step under measured acceptance rates, without replacement.

    Children are drawn by Gumbel-top-k, a pass per level. Greedy requests take the most likely tokens. Unlike the
    paper's, drafts end where the drafter gives all other tokens probability zero.

    Attributes:
        nodes, depth: Bounds.
        acceptance: How often the first, second, ... child of a node is the accepted one; the default was measured with
            the shipped draft, `acceptance_by_rank` measures that of a model and its drafter.
        draft_cost: Time of a draft pass by that of a target pass over one row; with it, the tree is chosen that emits
            most tokens per second on this machine.
    """

    nodes: int = 64
    depth: int = 8
    acceptance: tuple[float, ...] = MEASURED
    draft_cost: float | None = None

    provides = Provides(drafts=("without-replacement",))

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth) < 1:
            raise SettingsError("sequoia needs nodes and depth >= 1")
        if not self.acceptance or not all(0 < rate <= 1 for rate in self.acceptance):
            raise SettingsError("sequoia needs at least one acceptance rate, each above 0 and at most 1")
        if self.draft_cost is not None and not 0 <= self.draft_cost < np.inf:
            raise SettingsError("sequoia needs a finite draft_cost, 0 or more")

    @property
    def requirements(self) -> Requirements:
        return Requirements(costs=self.draft_cost is not None)

    def largest(self) -> int:
        return self.nodes

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        if self.draft_cost is not None and budget.pass_seconds is not None:
            seconds = tuple(budget.seconds(np.arange(nodes + 2)).tolist())
            shape = fastest_tree(self.acceptance, nodes, depth, self.draft_cost * seconds[1], seconds)
        else:
            shape = best_tree(self.acceptance, nodes, depth)
        return (yield from Growing(expander, seq, budget, self.origin).fill(shape))

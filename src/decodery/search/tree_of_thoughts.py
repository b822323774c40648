"""Tree of Thoughts: several steps after each of several texts; those of most value are followed, broad or deep."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import RESAMPLE, gumbel
from decodery.core.registry import register
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer, log_scores
from decodery.step.sequence import Sequence

from .pool import require_count
from .step_nodes import Node, distinct
from .steps import Growth, StepSearch


@register(
    "tree-of-thoughts",
    paper="Tree of Thoughts: Deliberate Problem Solving with Large Language Models (2023)",
    guarantee="n=1 is plain decoding; with all steps drawn and the right values, the best text of the breadth",
    requirements=("nothing but the model that writes, which rates its own steps",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class TreeOfThoughts(StepSearch):
    """Draws n steps after each text, has them valued, and follows the b best or goes depth first.

    The published values are sums over answers, these are their mean. Proposing steps by a prompt of its own and voting
    among states, which are other prompts for every task, are not here. Cost: b * n steps a round, and as many values.

    Attributes:
        scorer: By default `rating`, which asks the model itself whether a text can still lead to an answer and counts
            impossible as 0.001, likely as 1 and sure as 20; any other will do.
        rounds: The depth of the tree; other settings: see step-beam.
        n: Steps drawn after each text.
        b: Texts followed at a time by "bfs".
        order: "bfs" follows b texts at a time, chosen by select: "greedy" the best, "sampled" drawn without replacement
            by their values, which must be no less than 0, or logarithms. "dfs" goes on from the best child, turns back
            where a value is below `threshold`, and stops when `answers` texts have ended; texts below it are followed,
            the best first, only where no other text ends. Equal steps after one text are one, and a text is valued
            once.
        select: How "bfs" chooses texts: the best ("greedy") or drawn by value ("sampled").
        threshold: Value below which "dfs" turns back; None never.
        answers: Ended texts at which "dfs" stops.
    """

    scorer: Scorer | str = "rating"
    rounds: int = 4
    n: int = 5
    b: int = 5
    order: Literal["bfs", "dfs"] = "bfs"
    select: Literal["greedy", "sampled"] = "greedy"
    threshold: float | None = None
    answers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "b", "answers"):
            require_count("tree-of-thoughts", name, getattr(self, name))
        if self.order not in ("bfs", "dfs") or self.select not in ("greedy", "sampled"):
            raise SettingsError("tree-of-thoughts has the order bfs or dfs, and select greedy or sampled")
        if self.threshold is not None:
            require_number("the threshold of tree-of-thoughts", self.threshold)
            if self.order == "bfs":
                raise SettingsError("tree-of-thoughts has a threshold where it goes deep: give order=dfs with it")

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.n * (self.b if self.order == "bfs" else 1)

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        found = yield from (self._broad(growth) if self.order == "bfs" else self._deep(growth))
        return (yield from growth.finish(found))

    def _broad(self, growth: Growth) -> ForwardCoroutine[list[Node]]:
        level = [growth.root]
        while going := [node for node in level if not node.finished]:
            # Texts that have ended keep their places among the best.
            ended = [node for node in level if node.finished]
            fresh = yield from self._children(growth, going)
            level = self._chosen([*ended, *chain(*fresh)], growth.root.seq.request.seed)
        return level

    def _deep(self, growth: Growth) -> ForwardCoroutine[list[Node]]:
        stack, left, ended = [growth.root], list[Node](), list[Node]()
        while len(ended) < self.answers and (stack or (left and not ended)):
            if not stack:
                left.sort(key=self.worth)
                stack.append(left.pop())
            node = stack.pop()
            if node.finished:
                ended.append(node)
                continue
            (children,) = yield from self._children(growth, [node])
            kept = [child for child in children if self.threshold is None or self.worth(child) >= self.threshold]
            left += [child for child in children if child not in kept]
            # The best one comes off the stack first, of equals the one drawn first.
            kept.sort(key=self.worth, reverse=True)
            stack += reversed(kept)
        return ended

    def _children(self, growth: Growth, parents: list[Node]) -> ForwardCoroutine[list[list[Node]]]:
        """n steps after each of these texts, judged, of equals after one text the first."""
        drawn = yield from growth.extend([parent for parent in parents for _ in range(self.n)])
        apart = [distinct(drawn[first : first + self.n]) for first in range(0, len(drawn), self.n)]
        judged = {id(node) for node in (yield from growth.judge(list(chain(*apart))))}
        return [[node for node in nodes if id(node) in judged] for nodes in apart]

    def _chosen(self, nodes: list[Node], seed: int) -> list[Node]:
        """The b texts that are followed."""
        worth = torch.tensor([self.worth(node) for node in nodes], dtype=torch.float64, device="cpu")
        if self.select == "sampled":
            # Gumbel-top-k: draws without replacement, by the value of each.
            numbers = torch.tensor([node.number for node in nodes], dtype=torch.int64, device="cpu")
            worth = log_scores(self.judge, worth) + gumbel(seed, 0, numbers, RESAMPLE)
        best = torch.argsort(worth, descending=True, stable=True)[: self.b]
        return [nodes[number] for number in best.tolist()]

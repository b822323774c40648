"""Tolerant verification: keep drafted tokens that the target finds nearly as good as its own choice."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


def tolerated(law: torch.Tensor, tokens: Ordered[int], top: int, margin: float) -> list[bool]:
    """Which of `tokens` are in the `top` most likely logits and at most `margin` below the best.

    Of tokens with equal logits the lowest ids count as the more likely ones.
    """
    ids = torch.arange(len(law), device=law.device)
    result = []
    for token in tokens:
        better = int((law > law[token]).sum()) + int(((law == law[token]) & (ids < token)).sum())
        result.append(better < top and bool(law[token] >= law.max() - margin))
    return result


@register(
    "tolerance",
    paper="Lossless Acceleration for Seq2seq Generation with Aggressive Decoding (2022)",
    guarantee="lossy: every token is the target's own choice or one of its `top` best within `margin` of the best",
)
@dataclass(frozen=True)
class Tolerance(AcceptanceRule):
    """Accepts the target's own choice, else the most likely drafted token that is nearly as good.

    GAD++ of its paper. Both are read after the request's processors. Where nothing passes the target's own choice is
    emitted: the argmax, or the coupled draw where the request samples. top=1 is greedy decoding at temperature 0.
    Source: microsoft/unilm, decoding/GAD (2022), whose script has 5 and 3.

    Attributes:
        top: How many of the target's most likely tokens may pass (beta).
        margin: How far, in nats, below the best one they may lie (tau).
    """

    top: int = 5
    margin: float = 3.0

    def __post_init__(self) -> None:
        if self.top < 1 or not 0 <= self.margin < math.inf:
            raise SettingsError("tolerance needs top >= 1 and a finite margin >= 0")

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        path: list[int] = []
        node = 0
        while True:
            token = laws.picks([node])[0]
            child = tree.child(node, token)
            if child is None:
                child = self._second_best(tree, laws.rows([node])[0], node)
            if child is None:
                return Accepted(path, token)
            path.append(child)
            node = child

    def _second_best(self, tree: DraftTree, law: torch.Tensor, node: int) -> int | None:
        children = tree.children(node).tolist()
        tokens = [int(tree.tokens[child]) for child in children]
        passing = tolerated(law, tokens, self.top, self.margin)
        allowed = [pair for pair, passes in zip(zip(tokens, children, strict=True), passing, strict=True) if passes]
        return max(allowed, key=lambda pair: float(law[pair[0]]))[1] if allowed else None

"""Verification rules that are wrong on purpose. A law that cannot tell them from right ones proves nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core import noise
from decodery.speculative.acceptance.rejection import Rejection
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


@dataclass(frozen=True)
class LongestMatch(AcceptanceRule):
    """A wrong rule: draws anew for every path and keeps the longest match, which favours drafts."""

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        best = Accepted([], -1)
        leaves = [node for node in range(len(tree)) if not len(tree.children(node))]
        for number, leaf in enumerate(leaves):
            path: list[int] = []
            for node in [*tree.path(leaf), -1]:
                at = path[-1] if path else 0
                token = _draw(laws, at, seq, number)
                if node < 0 or token != tree.tokens[node]:
                    break
                path.append(node)
            if best.bonus < 0 or len(path) > len(best.path):
                best = Accepted(path, token)
        return best


@dataclass(frozen=True)
class NoResidual(Rejection):
    """A wrong rule: draws from the target's distribution, not the residual, after a rejection."""

    @staticmethod
    def _test(
        tree: DraftTree, law: torch.Tensor, node: int, children: list[int], seed: int, position: int
    ) -> tuple[int | None, torch.Tensor]:
        child, _ = Rejection._test(tree, law, node, children, seed, position)
        return child, law


@dataclass(frozen=True)
class Shallow(Rejection):
    """Speculative sampling that tests the first drafted token alone and believes all after it."""

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        right = super().choose(tree, laws, seq)
        path = right.path[:1]
        while path and len(children := tree.children(path[-1])):
            path.append(int(children[0]))
        return Accepted(path, laws.picks([path[-1]])[0]) if path else right


@dataclass(frozen=True)
class Credulous(AcceptanceRule):
    """Accepts every first child: any draft becomes text."""

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        path: list[int] = []
        node = 0
        while len(children := tree.children(node)):
            node = int(children[0])
            path.append(node)
        return Accepted(path, laws.picks([node])[0])


def _draw(laws: NodeDistributions, node: int, seq: Sequence, number: int) -> int:
    log_probs = laws.probabilities(node).log()[None]
    return int(noise.gumbel_argmax(log_probs, noise.mix(seq.request.seed, number), [laws.position(node)])[0])

"""Speculative sampling: accept a drafted token with probability min(1, p/q), else draw from what p has left."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core import noise
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence

from .exact import draw, point_mass_law, sampled_law


@register(
    "rejection",
    paper="Fast Inference from Transformers via Speculative Decoding (2023)",
    guarantee="distribution-identical: the same distribution as plain sampling; greedy-identical at temperature 0",
    lossless=True,
)
@dataclass(frozen=True)
class Rejection(AcceptanceRule):
    """Accepts a drawn child c with probability min(1, p(c) / q(c)), else draws from norm(max(p - q, 0)).

    Deterministic children count as drawn from a point mass. Its uniforms and residual draws are hashed from seed and
    output position in streams of their own, apart from the noise that drafted.
    """

    requirements = Requirements(drafts=("deterministic", "sampled"), laws=True)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        path: list[int] = []
        node = 0
        while True:
            law = laws.probabilities(node)
            children = tree.children(node).tolist()
            position = laws.position(node)
            child, rest = self._test(tree, law, node, children, seq.request.seed, position)
            if child is None:
                return Accepted(path, draw(rest, seq.request.seed, position))
            path.append(child)
            node = child

    @staticmethod
    def _test(
        tree: DraftTree, law: torch.Tensor, node: int, children: list[int], seed: int, position: int
    ) -> tuple[int | None, torch.Tensor]:
        tokens = [int(tree.tokens[child]) for child in children]
        if not children:
            return None, law
        if tree.origin == "sampled":
            accept, rest = sampled_law(law, tree.distributions[node], tokens[0])
            accepts = [accept]
        else:
            accepts, rest = point_mass_law(law, tokens)
        for number, accept in enumerate(accepts):
            if noise.draw(seed, position, number, stream=noise.ACCEPT) < accept:
                return children[number], rest
        return None, rest

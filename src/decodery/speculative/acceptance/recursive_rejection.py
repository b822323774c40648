"""Recursive rejection: test siblings one after another, each against what the ones before it left of the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence

from .exact import Tests, recursive_law, walk, without


def without_replacement(tokens: Iterable[int], q: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The distributions that `tokens` came from, drawn without replacement from q."""
    for token in tokens:
        yield token, q
        q = without(q, token)


@register(
    "recursive-rejection",
    paper="Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement (2024)",
    guarantee="distribution-identical: the same distribution as plain sampling; greedy-identical at temperature 0",
    lossless=True,
)
@dataclass(frozen=True)
class RecursiveRejection(AcceptanceRule):
    """Tests siblings in draw order, updating the target to the residual after each rejection.

    Child c passes with probability min(1, r(c) / q(c)), else r becomes norm(max(r - q, 0)). r starts as the target's
    distribution p. Independent siblings (SpecInfer's multi-step speculative sampling) share one q, and a token drawn
    twice is tested twice; without replacement (RSD, Sequoia, DySpec) the q of a sibling is the node's without the
    siblings before it, normalised. Children that were not drawn by chance count as point masses. Where none passes, the
    token comes from the last r. Which nodes get children may depend on anything drawn before, never on the token about
    to be drawn or on noise it shares; no drawn sibling may be left out.
    """

    requirements = Requirements(drafts=("deterministic", "sampled", "without-replacement"), laws=True)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        def tests(p: torch.Tensor, tokens: list[int], q: torch.Tensor) -> Tests:
            without = tree.origin == "without-replacement"
            return recursive_law(p, without_replacement(tokens, q) if without else ((token, q) for token in tokens))

        return walk(tree, laws, seq, tests)

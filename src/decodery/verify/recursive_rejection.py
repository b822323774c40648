"""Recursive rejection: test siblings one after another, each against what the ones before it left of the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core import noise
from ..core.sequence import Sequence
from ..core.tree import Origin, TokenTree
from ..registry import register
from .base import Accepted, Laws, Rule
from .exact import acceptance, draw, residual, without


def recursive_law(
    p: torch.Tensor, draws: Iterable[tuple[int, torch.Tensor | None]]
) -> Iterator[tuple[float, torch.Tensor]]:
    """For each draw: the probability that it is accepted where all before it were not, and what those left of p.

    p: [vocab] float64. draws: tokens in draw order, each with the [vocab] float64 probabilities it was drawn from, or
    None for a token that was not drawn by chance. The last pair is (0, the law of what is emitted where no draw was
    accepted). Every law is worked out when it is asked for: a walk that accepts the first draw pays for nothing else.
    """
    rest = p
    for token, q in draws:
        yield (float(rest[token]) if q is None else acceptance(rest, q, token)), rest
        rest = without(rest, token) if q is None else residual(rest, q)
    yield 0.0, rest


def without_replacement(tokens: Iterable[int], q: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The laws that `tokens`, drawn one after another without replacement from q, came from: q without those before."""
    for token in tokens:
        yield token, q
        q = without(q, token)


@register(
    "recursive-rejection",
    paper="Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement (2024)",
    guarantee="distribution-identical: the same law as plain sampling; greedy-identical at temperature 0",
    lossless=True,
    needs=("siblings in draw order, independent of each other or drawn without replacement",),
)
@dataclass(frozen=True)
class RecursiveRejection(Rule):
    """Tests siblings in draw order: c passes with probability min(1, r(c) / q(c)), else r becomes norm(max(r - q, 0)).

    r starts as the target's law p. Independent siblings (SpecInfer's multi-step speculative sampling) share one q, and
    a token drawn twice is tested twice; without replacement (RSD, Sequoia, DySpec) the q of a sibling is the node's
    without the siblings before it, normalised. Children that were not drawn by chance count as point masses. Where none
    passes, the token comes from the last r. Which nodes get children may depend on anything drawn before, never on the
    token about to be drawn or on noise it shares; no drawn sibling may be left out.
    """

    origins: ClassVar[frozenset[Origin]] = frozenset({"deterministic", "sampled", "without-replacement"})
    uses_draft_distributions: ClassVar[bool] = True

    def choose(self, tree: TokenTree, laws: Laws, seq: Sequence) -> Accepted:
        path: list[int] = []
        node = 0
        while True:
            position, children = laws.position(node), tree.drawn(node)
            tests = recursive_law(laws.probabilities(node), self._draws(tree, node, children))
            for number, (child, (accept, _)) in enumerate(zip(children, tests, strict=False)):
                if noise.draw(seq.seed, position, number, stream=noise.ACCEPT) < accept:
                    path.append(child)
                    node = child
                    break
            else:
                _, rest = next(tests)
                return Accepted(path, draw(rest, seq.seed, position))

    @staticmethod
    def _draws(tree: TokenTree, node: int, children: list[int]) -> Iterable[tuple[int, torch.Tensor | None]]:
        tokens = [int(tree.tokens[child]) for child in children]
        if not tokens or tree.origin == "deterministic":
            return [(token, None) for token in tokens]
        q = tree.distributions[node]
        return without_replacement(tokens, q) if tree.origin == "without-replacement" else [(t, q) for t in tokens]

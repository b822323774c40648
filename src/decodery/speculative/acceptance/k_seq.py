"""SpecTr's k-SEQ: one acceptance test for each of k independent draws, and one residual for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence as Decoded

from .exact import Tests, positive, walk

_BISECTIONS = 50


def discount(p: torch.Tensor, q: torch.Tensor, k: int) -> tuple[float, float]:
    """rho and beta: the factor that lowers each draw's acceptance, and the acceptance of one draw.

    Args:
        p, q: [vocab] float64. beta(rho) = sum min(q, p / rho), and rho is the least number in [1, k] for which 1 - (1 -
            beta)^k <= rho * beta: what k tests accept of a token must not exceed what p has of it.
    """
    wanted, drawn = p.cpu().numpy(), q.cpu().numpy()
    # For rho between 1 and k only tokens with a ratio between these change sides; there are few.
    whole, none = wanted >= k * drawn, wanted < drawn
    open_ = ~(whole | none)
    below, above = float(wanted[none].sum()), float(drawn[whole].sum())
    wanted, drawn = wanted[open_], drawn[open_]

    def beta(rho: float) -> float:
        return above + below / rho + float(np.minimum(drawn, wanted / rho).sum())

    def enough(rho: float) -> bool:
        chance = beta(rho)
        return 1.0 - (1.0 - chance) ** k <= rho * chance

    low, high = 1.0, float(k)
    if k == 1 or enough(low):
        return low, beta(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, beta(high)


def k_seq_law(p: torch.Tensor, tokens: Sequence[int], q: torch.Tensor) -> Tests:
    """For each of `tokens`, drawn from q: its acceptance probability if none before it was accepted.

    Beside it stands p; the last pair is (0, the distribution of what is emitted where none was accepted).

    Args:
        p, q: [vocab] float64.
    """
    rho, beta = discount(p, q, len(tokens))
    for token in tokens:
        wanted, drawn = float(p[token]), rho * float(q[token])
        yield (wanted / drawn if wanted < drawn else float(wanted > 0.0)), p
    if beta <= 0.0:
        yield 0.0, p
        return
    accepted = 1.0 - (1.0 - beta) ** len(tokens)
    yield 0.0, positive(p - torch.minimum(q, p / rho) * (accepted / beta), p)


@register(
    "k-seq",
    paper="SpecTr: Fast Speculative Decoding via Optimal Transport (2023)",
    guarantee="distribution-identical: the same distribution as plain sampling; greedy-identical at temperature 0",
    lossless=True,
)
@dataclass(frozen=True)
class KSeq(AcceptanceRule):
    """Accepts each of k independent draws c with probability min(1, p(c) / (rho q(c))), else a residual.

    rho depends on p, q and k, the number of draws at the node: of several drafted texts those that begin with what has
    been accepted. The chance that one of the draws is accepted is within 1 - 1/e of the best any rule can do. Children
    that were not drawn by chance count as point masses.
    """

    requirements = Requirements(drafts=("deterministic", "sampled"), laws=True)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Decoded) -> Accepted:
        return walk(tree, laws, seq, k_seq_law)

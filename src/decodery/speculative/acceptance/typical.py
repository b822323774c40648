"""Medusa's typical acceptance: keep every draft that the target finds plausible."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


def threshold(p: torch.Tensor, epsilon: float, delta: float) -> float:
    """min(epsilon, delta * exp(-H(p))): the less sure p [vocab] is, the less a token needs. H is in nats."""
    return min(epsilon, delta * float(torch.exp(-torch.special.entr(p).sum())))


@register(
    "typical",
    paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (2024)",
    guarantee="lossy: drafted tokens above a threshold of probability are kept, whatever the sampler would have drawn; "
    "greedy-identical at temperature 0",
)
@dataclass(frozen=True)
class Typical(AcceptanceRule):
    """Accepts the longest path of tokens with p > min(epsilon, delta * exp(-H)), H the entropy.

    p is the request's own distribution, after its processors. Of equally long paths the more likely one wins. The token
    after the path is drawn from the target as under the coupled rule, where Medusa takes its own next draft's root.
    epsilon=1 with delta=inf accepts nothing; epsilon=0 accepts every token with p > 0. Source: FasterDecoding/Medusa
    (2024), whose entropy is of probabilities plus 1e-5.

    Attributes:
        epsilon: The highest threshold on a token's probability.
        delta: Factor of the threshold that depends on entropy.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1 or not self.delta >= 0:
            raise SettingsError("typical needs epsilon between 0 and 1 and delta >= 0")

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        # How deep each passing node is, then how likely its path: the greatest pair wins.
        reached = {0: (0, 0.0)}
        waiting = [0]
        while waiting:
            node = waiting.pop()
            children = tree.children(node)
            if not len(children):
                continue
            p = laws.probabilities(node)
            least = threshold(p, self.epsilon, self.delta)
            chances = p[torch.from_numpy(tree.tokens[children])].tolist()
            depth, logp = reached[node]
            for child, chance in zip(children.tolist(), chances, strict=True):
                if chance > least:
                    reached[child] = (depth + 1, logp + math.log(chance))
                    waiting.append(child)
        last = max(reached, key=lambda node: reached[node])
        return Accepted(tree.path(last), laws.picks([last])[0])

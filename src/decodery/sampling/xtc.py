"""XTC: at random positions, all likely tokens except the least likely of them are excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.noise import WARP, draw
from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_number
from .masks import largest


@register("xtc", guarantee="lossy; probability=0 or a threshold above 0.5 is the identity")
@dataclass(frozen=True)
class XTC(LogitsProcessor):
    """Excludes, at a random share of positions, all tokens above a threshold except the least probable.

    Of equals the highest id is kept. Whether a position is changed is a hash of seed and position, so that repeated
    calls agree. As in llama.cpp (2024).

    Attributes:
        probability: Probability that a position is changed.
        threshold: Probability from which a token may be excluded; with fewer than two such tokens, no token is.
    """

    probability: float = 0.5
    threshold: float = 0.1
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("the probability of xtc", self.probability, least=0.0, most=1.0)
        require_number("the threshold of xtc", self.threshold, above=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.probability == 0.0 or self.threshold > 0.5

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        chosen = [draw(each.seed, each.position, stream=WARP) < self.probability for each in contexts]
        if self.neutral or not any(chosen):
            return logits
        # No more than 1 / threshold tokens can reach it.
        values, ids = largest(logits, int(1 / self.threshold) + 1)
        likely = (values - logits.logsumexp(dim=-1, keepdim=True)).exp() >= self.threshold
        numbers = torch.arange(1, ids.shape[-1] + 1, device=logits.device)
        dropped = (numbers < likely.sum(dim=-1, keepdim=True)) & torch.tensor(
            chosen, dtype=torch.bool, device=logits.device
        )[:, None]
        return logits.scatter(-1, ids, values.masked_fill(dropped, -torch.inf))

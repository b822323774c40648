"""Presence penalty: tokens that occur in the output become less likely by a fixed amount."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .history import TokenCounts, token_counts
from .logits_processor import Context, LogitsProcessor, Stage, require_number


@register("presence-penalty", guarantee="lossy; penalty=0 is the identity")
@dataclass(frozen=True)
class PresencePenalty(LogitsProcessor):
    """Lowers the logits of generated tokens by the penalty, once per token; the prompt does not count.

    Attributes:
        penalty: In logits, usually -2 to 2.
    """

    penalty: float = 0.5
    stage = Stage.EDIT
    stateful = True
    hears_logprobs = False

    def __post_init__(self) -> None:
        require_number("presence-penalty", self.penalty)

    @property
    def neutral(self) -> bool:
        return self.penalty == 0.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or not contexts:
            return logits
        ids, counts = token_counts([context.state for context in contexts], logits.shape[-1])
        fall = torch.from_numpy((counts > 0) * -self.penalty).to(logits)
        return logits.index_add(1, torch.from_numpy(ids).to(logits.device), fall)

    def init(self, prompt: Sequence[int]) -> TokenCounts:
        return TokenCounts.of([])

    def advance(self, state: TokenCounts, token: int, logprob: float) -> TokenCounts:
        return state.add(token)

"""Repetition penalty: tokens that have occurred become less likely by a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .history import TokenCounts, token_counts
from .logits_processor import Context, LogitsProcessor, Stage, require_number


@register(
    "repetition-penalty",
    paper="CTRL: A Conditional Transformer Language Model for Controllable Generation (2019)",
    guarantee="lossy; penalty=1 is the identity",
)
@dataclass(frozen=True)
class RepetitionPenalty(LogitsProcessor):
    """Divides the positive and multiplies the negative logits of all tokens in the prompt and the output.

    Attributes:
        penalty: A factor above 0, applied once per token; above 1 discourages, below 1 encourages repetition.
    """

    penalty: float = 1.2
    stage = Stage.EDIT
    stateful = True
    hears_logprobs = False

    def __post_init__(self) -> None:
        require_number("repetition-penalty", self.penalty, above=0.0)

    @property
    def neutral(self) -> bool:
        return self.penalty == 1.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or not contexts:
            return logits
        seen, counts = token_counts([context.state for context in contexts], logits.shape[-1])
        ids = torch.from_numpy(seen).to(logits.device)
        occurred = torch.from_numpy(counts > 0).to(logits.device)
        before = logits[:, ids]
        after = torch.where(before < 0, before * self.penalty, before / self.penalty)
        return logits.index_copy(1, ids, torch.where(occurred, after, before))

    def init(self, prompt: Sequence[int]) -> TokenCounts:
        return TokenCounts.of(prompt)

    def advance(self, state: TokenCounts, token: int, logprob: float) -> TokenCounts:
        return state.add(token)

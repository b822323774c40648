"""A minimum number of new tokens, before which the text cannot end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_count
from .masks import exclude


@register(
    "min-new-tokens",
    guarantee="no end token in the first `count` tokens, unless no other token is possible; count=0 is the identity",
)
@dataclass(frozen=True)
class MinNewTokens(LogitsProcessor):
    """Excludes the end tokens until a given number of tokens has been generated.

    Attributes:
        count: Minimum number of tokens before an end token.
        eos: Ids of all end tokens of the model.
    """

    count: int = 0
    eos: tuple[int, ...] = ()
    stage = Stage.MASK

    def __post_init__(self) -> None:
        require_count("min-new-tokens", self.count)
        object.__setattr__(self, "eos", tuple(self.eos))
        for token in self.eos:
            require_count("an end token of min-new-tokens", token)

    @property
    def neutral(self) -> bool:
        return self.count == 0 or not self.eos

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        ends = [token for token in self.eos if token < logits.shape[-1]]
        return exclude(logits, [ends if context.position < self.count else [] for context in contexts])

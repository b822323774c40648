"""No repeated n-grams: a token that would complete an n-gram a second time is excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.registry import register

from .history import Repeats
from .logits_processor import Context, LogitsProcessor, Stage, require_count
from .masks import exclude


@register(
    "no-repeat-ngram",
    paper="A Deep Reinforced Model for Abstractive Summarization (2017)",
    guarantee="no n-gram of this size occurs twice, unless no other token is possible; size=0 is the identity",
)
@dataclass(frozen=True)
class NoRepeatNGram(LogitsProcessor):
    """Excludes every token that would complete an n-gram the prompt or the output already has.

    Ids without a logit are left out.

    Attributes:
        size: Tokens per n-gram; 0 excludes nothing, 1 excludes every token that has occurred.
    """

    size: int = 3
    stage = Stage.MASK
    stateful = True
    hears_logprobs = False

    def __post_init__(self) -> None:
        require_count("no-repeat-ngram", self.size)

    @property
    def neutral(self) -> bool:
        return self.size == 0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or not contexts:
            return logits
        banned = [self._completions(context.state) for context in contexts]
        return exclude(logits, [ids[ids < logits.shape[-1]] for ids in banned])

    def init(self, prompt: Sequence[int]) -> Repeats:
        return Repeats.of(prompt)

    def advance(self, state: Repeats, token: int, logprob: float) -> Repeats:
        return state.add(token)

    def _completions(self, seen: Repeats) -> np.ndarray:
        """Tokens that followed earlier occurrences of the last size - 1 tokens."""
        return seen.tokens() if self.size == 1 else seen.followers(self.size - 1)[0]

"""CopySpec: when the last few tokens stood in the text before, copy what followed them."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence

from ..stores.positions import Positions
from .copy_batch import CopiedText, CopyBatch


@register(
    "copyspec",
    paper="CopySpec: Accelerating LLMs with Speculative Copy-and-Paste Without Compromising Quality (2025)",
    lossless=True,
)
@dataclass(frozen=True)
class CopySpec(Drafter):
    """Copies what followed the last few tokens where they stood first, in the prompt or in the answer.

    With a draft model beside it: `cascade(CopySpec(), DraftModel(model, length=5))`, where 5 is the published delta.
    Scope: the request; memory: one dictionary entry per token.

    Attributes:
        gamma: How many tokens must match.
        length: Tokens copied, fewer where the text ends.
        pick: Which earlier place to copy from.
    """

    gamma: int = 3
    length: int = 10
    pick: Literal["first", "last"] = "first"

    def __post_init__(self) -> None:
        if self.gamma < 1 or self.length < 1 or self.pick not in ("first", "last"):
            raise SettingsError("copyspec needs gamma >= 1, length >= 1 and pick 'first' or 'last'")

    def largest(self) -> int:
        return self.length

    def start(self, seq: Sequence) -> CopiedText[Positions]:
        return CopiedText(Positions(self.gamma, self.pick), (self.gamma,), self.pick)

    @property
    def together(self) -> Hashable:
        return self

    def batch(self, sequences: Ordered[Sequence], places: Ordered[int]) -> CopyBatch | None:
        return CopyBatch.of(self, places, sequences, length=self.length, wraps=False)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        index: Positions = seq.states[self].index
        index.extend(seq.tokens)
        start = index.find(seq.tokens)
        if start is None:
            return DraftTree.root(seq.last_token)
        source = start + self.gamma
        length = min(self.length, budget.nodes, budget.depth)
        return DraftTree.chain(seq.last_token, seq.tokens[source : source + length])

    def match_length(self, seq: Sequence) -> int:
        """`gamma` where the last tokens stood before, else 0."""
        index: Positions = seq.states[self].index
        index.extend(seq.tokens)
        return 0 if index.find(seq.tokens) is None else self.gamma

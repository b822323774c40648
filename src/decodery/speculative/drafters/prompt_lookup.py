"""Prompt lookup: what followed the last few tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence

from ..stores.ngrams import Occurrences, Pick, copy
from .copy_batch import CopiedText, CopyBatch


@register("prompt-lookup", paper="Prompt Lookup Decoding (2023)", lossless=True)
@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies what followed the longest recent n-gram where it occurred before in prompt or answer.

    A copy that reaches the end of the text goes on into itself, so that repetitions of any period are continued. Scope:
    the request; memory: `max_ngram` dictionary entries per token. Source: apoorvumang/prompt-lookup-decoding (2023),
    which picks the first occurrence.

    Attributes:
        max_ngram: Longest suffix looked up; shorter ones are tried after it.
        length: Tokens copied.
        pick: Which earlier occurrence to copy from, "last" or "first".
    """

    max_ngram: int = 3
    length: int = 10
    pick: Pick = "last"

    def __post_init__(self) -> None:
        if self.max_ngram < 1 or self.length < 1 or self.pick not in ("last", "first"):
            raise SettingsError("prompt-lookup needs max_ngram >= 1, length >= 1 and pick 'last' or 'first'")

    def largest(self) -> int:
        return self.length

    def start(self, seq: Sequence) -> CopiedText[Occurrences]:
        orders = range(self.max_ngram, 0, -1)
        return CopiedText(Occurrences(orders, self.pick), orders, self.pick)

    @property
    def together(self) -> Hashable:
        return self

    def batch(self, sequences: Ordered[Sequence], places: Ordered[int]) -> CopyBatch | None:
        return CopyBatch.of(self, places, sequences, length=self.length, wraps=True)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        known = seq.states[self].index
        known.extend(seq.tokens)
        if (found := known.find(seq.tokens)) is None:
            return DraftTree.root(seq.last_token)
        copied = copy(seq.tokens, found[0], min(self.length, budget.nodes, budget.depth))
        ends = (place for place, token in enumerate(copied, start=1) if token in seq.request.eos_ids)
        return DraftTree.chain(seq.last_token, copied[: next(ends, None)])

"""Excluded and required tokens at output positions of one text, for monitors that take tokens back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .logits_processor import Context, LogitsProcessor, Stage
from .masks import exclude


@dataclass(frozen=True)
class Banned(LogitsProcessor):
    """Excludes tokens at output positions of one text.

    Attributes:
        banned: By position, ids of the excluded tokens.
        written: By position, the only token that is allowed there.
    """

    banned: dict[int, tuple[int, ...]] = field(default_factory=dict, hash=False)
    written: dict[int, int] = field(default_factory=dict, hash=False)
    stage = Stage.MASK

    def again(self, position: int, ban: Sequence[int], write: Sequence[int]) -> Banned:
        """Start again from `position`: exclude `ban` there, and require the tokens of `write` from there on."""
        banned = {at: tokens for at, tokens in self.banned.items() if at <= position}
        written = {at: token for at, token in self.written.items() if at < position}
        if ban:
            banned[position] = (*banned.get(position, ()), *ban)
        return Banned(banned, written | dict(enumerate(write, position)))

    @property
    def end(self) -> int:
        """The first position from which on nothing is excluded or required."""
        return max((*self.banned, *self.written), default=-1) + 1

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        found = exclude(logits, [self.banned.get(context.position, ()) for context in contexts])
        for row, context in enumerate(contexts):
            token = self.written.get(context.position)
            if token is not None and logits[row, token] > -torch.inf:
                found = found.clone()
                found[row] = -torch.inf
                found[row, token] = logits[row, token]
        return found

"""Classifier-free guidance: away from what a negative prompt would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..model.batch import Batch, Scores
from ..model.protocol import LanguageModel
from ..registry import register
from ..sample.base import require_number
from .base import Source, token_ids
from .contexts import Composite, Member, Rows, begin, read, scores_of


@register(
    "guidance", paper="Stay on topic with Classifier-Free Guidance (2023)", guarantee="the model's law at scale 1"
)
@dataclass(frozen=True)
class Guidance(Source):
    """Moves every prediction away from what the model would say after a negative prompt.

    scale: the logits are log q + scale (log p - log q), p after the prompt and q after the negative one; 1 is the model
    alone, 0 the negative prompt in its place. negative: what the second context begins with, a text (encoded as prompts
    are) or token ids; None is the prompt's last token, as published. Both contexts are followed by the same output.
    Cost: a second row per row in the same pass, and a second cache.
    """

    scale: float = 1.5
    negative: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_number("the scale of guidance", self.scale)

    def encoded(self, encode: Callable[[str], list[int]]) -> Guidance:
        return replace(self, negative=tuple(encode(self.negative))) if isinstance(self.negative, str) else self

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> LanguageModel:
        negative = (prompt[-1],) if self.negative is None else self.negative
        negative = token_ids(negative, "guidance", "negative", model.vocab_size)
        if self.scale == 1.0:
            return model
        members = (Member("prompt", model), Member("negative", model, negative))
        return _Guided(members, len(prompt), scale=self.scale)


@dataclass(frozen=True)
class _Guided(Composite):
    scale: float = field(kw_only=True)

    def forward(self, batch: Batch, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None) -> Scores:
        parts = begin(batch, layers)
        asked: dict[int, list[Rows | None]] = {
            0: [part.everything() for part in parts],
            1: [part.only(1, part.wanted[part.output]) for part in parts],
        }
        logits, hidden = read(parts, asked, taps)
        for number, part in enumerate(parts):
            if part.output.any():
                given, guided = logits[0][number], torch.from_numpy(part.output)
                logits[0][number] = given.clone()
                logits[0][number][guided] = guide(given[guided], logits[1][number], self.scale)
        return scores_of(batch, logits[0], hidden)


def guide(given: torch.Tensor, against: torch.Tensor, scale: float) -> torch.Tensor:
    """Logits [n, vocab] that are `scale` times as far from `against` as `given` is, both in log-probabilities."""
    p, q = given.log_softmax(dim=-1), against.log_softmax(dim=-1)
    return q + scale * (p - q)

"""Controlled decoding: each token by the model's law and the value of the prefix it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..errors import SettingsError
from ..model.batch import Batch, Scores
from ..model.protocol import LanguageModel
from ..registry import register
from ..sample.base import require_number
from .base import EXCLUDED, Source
from .contexts import Composite, Member, Part, Rows, begin, read, scores_of
from .value import Value, fitted


@register(
    "controlled-decoding",
    paper="Controlled Decoding from Language Models (2023)",
    guarantee="the best law token by token for its distance to the model's, if the values are exact",
    needs=("a prefix scorer",),
)
@dataclass(frozen=True)
class ControlledDecoding(Source):
    """Weighs the model's likeliest tokens by exp(strength x value of the prefix with the token).

    value: a `Value`, or the file of a `LinearValue` that was trained for the model. strength: lambda of the paper; 0 is
    the model among its k likeliest tokens. k: tokens that are considered, all others are excluded. Cost: k rows more
    per row, in a second pass, where the value reads hidden states; no pass where it reads tokens.
    """

    value: Value | str
    strength: float = 1.0
    k: int = 10

    def __post_init__(self) -> None:
        require_number("the strength of controlled-decoding", self.strength)
        if self.k < 1:
            raise SettingsError(f"controlled-decoding needs k >= 1, not {self.k}")

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> LanguageModel:
        value = fitted(self.value, model)
        return _Controlled((Member("model", model),), len(prompt), value=value, strength=self.strength, k=self.k)


@dataclass(frozen=True)
class _Controlled(Composite):
    value: Value = field(kw_only=True)
    strength: float = field(kw_only=True)
    k: int = field(kw_only=True)

    def forward(self, batch: Batch, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None) -> Scores:
        parts = begin(batch, layers)
        logits, hidden = read(parts, {0: [part.everything() for part in parts]}, taps)
        asked = [number for number, part in enumerate(parts) if part.output.any()]
        laws, likeliest = {}, {}
        for number in asked:
            laws[number] = logits[0][number][torch.from_numpy(parts[number].output)].log_softmax(dim=-1)
            likeliest[number] = laws[number].topk(min(self.k, self.vocab_size), dim=-1)
        values = self._values([(parts[number], likeliest[number].indices) for number in asked])
        for number, worth in zip(asked, values, strict=True):
            logp, tokens = likeliest[number]
            scored = (laws[number] - EXCLUDED).scatter_(1, tokens, logp + self.strength * worth.to(logp))
            logits[0][number] = logits[0][number].clone()
            logits[0][number][torch.from_numpy(parts[number].output)] = scored
        return scores_of(batch, logits[0], hidden)

    def _values(self, asked: list[tuple[Part, torch.Tensor]]) -> list[torch.Tensor]:
        """The values [m, k] of the prefixes that every part's m output rows make with their candidate tokens [m, k]."""
        found: list[torch.Tensor] = []
        if self.strength == 0.0 or not asked:
            return [torch.zeros(tokens.shape) for _, tokens in asked]
        parts = [_with_children(part, tokens.cpu().numpy()) for part, tokens in asked]
        hidden: dict[int, torch.Tensor] = {}
        if self.value.taps:
            questions = [Rows(np.arange(len(each.segment)), each.wanted) for each in parts]
            _, hidden = read(parts, {0: questions}, self.value.taps)
        first = 0
        for (part, tokens), extended in zip(asked, parts, strict=True):
            last = first + len(extended.segment)
            own = {tap: states[last - tokens.numel() : last] for tap, states in hidden.items()}
            above = [part.prefix(row) for row in part.wanted[part.output].tolist()]
            prefixes = [[*above[i], token] for i, row in enumerate(tokens.tolist()) for token in row]
            found.append(self.value(prefixes, own).view(tokens.shape))
            part.contexts.counts["values"] += tokens.numel()
            first = last
        return found


def _with_children(part: Part, tokens: np.ndarray) -> Part:
    """The part's rows again, then candidate tokens [m, k] below each of its m output rows; no logits are wanted."""
    segment, n = part.segment, len(part.segment)
    assert segment.tokens is not None
    parents = np.repeat(part.wanted[part.output], tokens.shape[1])
    mask = np.zeros((n + len(parents),) * 2, dtype=bool)
    mask[:n, :n] = np.tri(n, dtype=bool) if segment.mask is None else segment.mask
    mask[n:, :n] = mask[parents, :n]
    mask[np.arange(n, len(mask)), np.arange(n, len(mask))] = True
    extended = replace(
        segment,
        positions=np.concatenate((segment.positions, segment.positions[parents] + 1)),
        tokens=np.concatenate((segment.tokens, tokens.reshape(-1))),
        mask=mask,
        logit_rows=[],
    )
    return Part(extended, part.contexts, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))

"""A hidden Markov model of a model's texts: exact distributions of the next tokens and later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from decodery.core.errors import VocabularyMismatch
from decodery.models.config import TOKENS, ModelConfig
from decodery.models.loaders.fields import Anything, Kind, Named, Text
from decodery.models.trained.artifact import Artifact, TrainedPart, expect

_NAMES = ("start", "transition", "emission", "tokens", "rest")


@dataclass(frozen=True, eq=False)
class HMM(TrainedPart):
    """States follow one another, and each says one token; no one sees the states.

    Attributes:
        start: [S] chances of the first state.
        transition: [S, S], from the row's state to the column's.
        emission: [S, K + 1], of the K tokens [K] int64 that have columns of their own, and in the last column of all
            others together.
        rest: [vocab] how those share that column, 0 for the K. What is known of a text is its *belief* [S]: the chances
            of the state that says the next token.
        vocabulary: That of the model, as in `ModelConfig`.
        facts: How it was made.
    """

    KIND = "hidden Markov model"
    FILE = "hmm.safetensors"
    MADE = "train one with `decodery train hmm -m MODEL --out DIR`, and name it, as in hmm:model=DIR"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "vocabulary": Text(256),
        "trained": Named(Anything(), 1 << 10),
        "vocab_size": TOKENS,
    }

    start: torch.Tensor
    transition: torch.Tensor
    emission: torch.Tensor
    tokens: torch.Tensor
    rest: torch.Tensor
    vocabulary: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def columns(self) -> torch.Tensor:
        """[vocab] int64, the column of every token."""
        found = torch.full((len(self.rest),), len(self.tokens), dtype=torch.int64, device="cpu")
        found[self.tokens] = torch.arange(len(self.tokens), device="cpu")
        return found

    @cached_property
    def _said(self) -> torch.Tensor:
        """[K + 1, S], the emission by columns, which `after` reads one at a time."""
        return self.emission.T.contiguous()

    @cached_property
    def _shares(self) -> torch.Tensor:
        """[vocab] logarithms of what a token has of its column."""
        return torch.where(self.rest > 0, self.rest, (self.columns < len(self.tokens)).to(self.rest)).log()

    def after(self, beliefs: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The beliefs [n, S] once one token more is known after each of `beliefs` [n, S]."""
        seen = beliefs * self._said[self.columns[list(tokens)]]
        return seen / seen.sum(dim=1, keepdim=True) @ self.transition

    def logits(self, beliefs: torch.Tensor, ahead: int = 1) -> torch.Tensor:
        """[n, vocab] log-probabilities of the token `ahead` positions on, given beliefs [n, S]; 1: the next."""
        for _ in range(ahead - 1):
            beliefs = beliefs @ self.transition
        columns = (beliefs @ self.emission).log()
        # Nearly all tokens share the last column: they are told first, and the others one by one.
        rows = columns[:, -1:] + self._shares
        rows[:, self.tokens] = columns[:, :-1]
        return rows

    def check(self, config: ModelConfig) -> None:
        """Raise VocabularyMismatch where it speaks other tokens than the model."""
        known = self.vocabulary and config.vocabulary
        if len(self.rest) != config.vocab_size or (known and self.vocabulary != config.vocabulary):
            raise VocabularyMismatch(f"this hidden Markov model was trained on another model's tokens: {self.MADE}")

    def artifact(self) -> Artifact:
        tensors = {name: getattr(self, name) for name in _NAMES} | {"tokens": self.tokens.int()}
        facts = {"vocabulary": self.vocabulary, "vocab_size": len(self.rest), "trained": dict(self.facts)}
        return Artifact(self.KIND, tensors, facts)

    @classmethod
    def from_artifact(cls, found: Artifact) -> HMM:
        start, transition, emission, tokens, rest = (found.tensors[name] for name in _NAMES)
        hmm = cls(start, transition, emission, tokens.long(), rest, found.facts["vocabulary"], found.facts["trained"])
        expect(_sound(hmm) and len(rest) == found.facts["vocab_size"])
        return hmm


def _sound(hmm: HMM) -> bool:
    """Whether shapes fit, rows are distributions, every state may say every token, and no token stands twice."""
    states, count, chances = len(hmm.start), len(hmm.tokens), (hmm.start, hmm.transition, hmm.emission, hmm.rest)
    shapes = [tuple(each.shape) for each in (*chances, hmm.tokens)]
    wanted = [(states,), (states, states), (states, count + 1), (len(hmm.rest),), (count,)]
    if shapes != wanted or not states or not count or any(each.dtype != hmm.start.dtype for each in chances):
        return False
    if not hmm.start.is_floating_point() or any(bool((each < 0).any()) for each in chances):
        return False
    if hmm.tokens.min() < 0 or hmm.tokens.max() >= len(hmm.rest) or len(hmm.tokens.unique()) < count:
        return False
    others = count < len(hmm.rest)
    said = hmm.emission if others else hmm.emission[:, :-1]
    unlike = torch.ones(len(hmm.rest), dtype=torch.bool, device="cpu")
    unlike[hmm.tokens] = False
    if not bool((said > 0).all()) or not torch.equal(hmm.rest > 0, unlike):
        return False
    sums = [hmm.start.sum()[None], hmm.transition.sum(dim=1), hmm.emission.sum(dim=1)]
    sums += [hmm.rest.sum()[None]] if others else []
    return bool(((torch.cat(sums) - 1).abs() < 1e-3).all())

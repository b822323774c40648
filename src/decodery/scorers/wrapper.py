"""Scorers that make something of another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from decodery.core.registry import resolve
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.scorer import Scorer


@dataclass(frozen=True)
class Wrapper(Scorer):
    """Needs what its scorer needs, and scores what that scores.

    Attributes:
        scorer: A scorer, or its name.
    """

    scorer: Scorer | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", resolve("scorer", self.scorer))

    @property
    def inner(self) -> Scorer:
        assert isinstance(self.scorer, Scorer)
        return self.scorer

    @property
    def prefixes(self) -> bool:
        return self.inner.prefixes

    @property
    def answers(self) -> bool:
        return self.inner.answers

    @property
    def writes(self) -> bool:
        return self.inner.writes

    @property
    def requirements(self) -> Requirements:
        return self.inner.requirements

    def bind(self, tokenizer: Tokenizer) -> Self:
        return replace(self, scorer=self.inner.bind(tokenizer))

    def remark(self, prompt: str, text: str) -> str:
        """See `Scorer.remark`."""
        return self.inner.remark(prompt, text)

    def fits(self, model: Reader) -> None:
        self.inner.fits(model)

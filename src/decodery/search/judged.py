"""What searches have in common that ask a scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ..core.needs import Needs
from ..model.protocol import Reader
from ..registry import resolve
from ..score.base import Scorer
from .base import Search

if TYPE_CHECKING:
    from ..model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Judged(Search):
    """Needs what its scorer needs. scorer: a scorer, or its name."""

    scorer: Scorer | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", resolve("score", self.scorer))

    @property
    def judge(self) -> Scorer:
        assert isinstance(self.scorer, Scorer)
        return self.scorer

    @property
    def needs(self) -> Needs:
        return self.judge.needs

    def fits(self, model: Reader) -> None:
        """Raise SettingsError where texts of this model cannot be judged."""
        self.judge.fits(model)

    def bind(self, tokenizer: Tokenizer) -> Self:
        return replace(self, scorer=self.judge.bind(tokenizer))

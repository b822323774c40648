"""What searches have in common that ask a scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer, remark_of

from .base import Search


def require_attempt(name: str, form: str) -> None:
    """Raise SettingsError for a form in which no attempt is shown."""
    if "{attempt}" not in form:
        raise SettingsError(f"{name} shows attempts: write {{attempt}} where one stands in shown")


@dataclass(frozen=True)
class JudgedSearch(Search):
    """Needs what its scorer needs.

    Attributes:
        scorer: A scorer, or its name.
    """

    scorer: Scorer | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", resolve("scorer", self.scorer))

    @property
    def judge(self) -> Scorer:
        assert isinstance(self.scorer, Scorer)
        return self.scorer

    @property
    def requirements(self) -> Requirements:
        return self.judge.requirements

    def fits(self, model: Reader) -> None:
        """Raise SettingsError where texts of this model cannot be judged."""
        self.judge.fits(model)

    def as_shown(self, form: str, question: str, attempt: str) -> ForwardCoroutine[str]:
        """An attempt as a later one reads it, with {attempt} and {remark} of `form` filled in.

        The remark is the scorer's.
        """
        remark = (yield from remark_of(self.judge, question, attempt)) if "{remark}" in form else ""
        return form.replace("{remark}", remark).replace("{attempt}", attempt)

    def bind(self, tokenizer: Tokenizer) -> Self:
        return replace(self, scorer=self.judge.bind(tokenizer))

"""What a context is best spent on: documents, worked examples, or rounds of follow-up questions, by a law of trials."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError

__all__ = ["ContextLaw", "Split", "SplitResult"]

_NEARLY_NONE, _SURE = 0.01, 0.005
"""What counts stand for 0, whose logarithm is none; how near to 0 and 1 an accuracy counts. Both are free choices."""


@dataclass(frozen=True)
class Split:
    """How a context is spent.

    Attributes:
        k: Documents.
        m: Worked examples.
        n: follow-up questions at most, as `drag` and `iter-drag` take them.
    """

    k: int
    m: int = 0
    n: int = 0

    def __post_init__(self) -> None:
        if min(self.k, self.m, self.n) < 0:
            raise SettingsError("a context is split into 0 or more documents, examples and follow-up questions")

    @property
    def logs(self) -> np.ndarray:
        """[3] logarithms."""
        return np.log(np.array([self.k, self.m, self.n], dtype=np.float64) + _NEARLY_NONE)


@dataclass(frozen=True)
class SplitResult:
    """What a split came to on some questions.

    Attributes:
        accuracy: Share right.
        document, example: What one document alone, and one example alone, gain there over neither: questions of one
            kind have them in common.
    """

    split: Split
    accuracy: float
    document: float
    example: float


@dataclass(frozen=True)
class ContextLaw:
    """logit accuracy = (a + b * gains) . log split + c, fitted by least squares.

    The computation allocation model of Inference Scaling for Long-Context Retrieval Augmented Generation (2024).

    Attributes:
        a: Of documents, examples and follow-up questions.
        b: Of documents and examples, times what one of them gains.
    """

    a: tuple[float, float, float]
    b: tuple[float, float]
    c: float

    @classmethod
    def fit(cls, trials: Ordered[SplitResult]) -> ContextLaw:
        """Raises SettingsError for fewer than six trials, which the law has numbers.

        By trials of one kind alone b and a cannot be told apart, and the smaller numbers are taken: it foretells that
        kind.
        """
        if len(trials) < 6:
            raise SettingsError(f"a law of six numbers needs as many trials, not {len(trials)}: try more splits")
        rows = np.array([_regressors(each.split, each.document, each.example) for each in trials])
        shares = np.clip([each.accuracy for each in trials], _SURE, 1 - _SURE)
        found = np.linalg.lstsq(rows, np.log(shares / (1 - shares)), rcond=None)[0].tolist()
        return cls(tuple(found[:3]), tuple(found[3:5]), found[5])

    def accuracy(self, split: Split, *, document: float, example: float) -> float:
        """The expected accuracy of a split, on questions of the kind that these gains describe."""
        logit = float(_regressors(split, document, example) @ np.array([*self.a, *self.b, self.c]))
        return float(1 / (1 + np.exp(-logit)))

    def best(self, splits: Iterable[Split], *, document: float, example: float) -> Split:
        """The most promising of these splits, which are to fit the context: of equals the first.

        What a split takes is what the trace of a search by it counts as `context_tokens`.

        Raises:
            SettingsError: If there is none.
        """
        found = list(splits)
        if not found:
            raise SettingsError("no split fits the context: give shorter documents, or a larger context")
        return max(found, key=lambda each: self.accuracy(each, document=document, example=example))


def _regressors(split: Split, document: float, example: float) -> np.ndarray:
    logs = split.logs
    return np.array([*logs, document * logs[0], example * logs[1], 1.0])

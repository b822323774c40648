"""What a search over whole texts is told to prefer: a weight of every beginning and of every finished text."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..contract import Contract
from ..errors import SettingsError
from ..model.tokenizer import Tokenizer

__all__ = ["Potential", "TextPotential"]

Score = Callable[[str], float | bool]


class Potential(Contract):
    """Natural logarithms of positive weights of texts; -inf rules a text out.

    A weight belongs to the text as a whole, not to its last piece: what a search multiplies in as a text grows is the
    ratio to the weight before, so that a finished text counts by `complete` alone and `prefix` only guides.
    """

    def bind(self, tokenizer: Tokenizer) -> Potential:
        """The same over this tokenizer's tokens; called before a search begins."""
        return self

    @abstractmethod
    def prefix(self, outputs: Sequence[Sequence[int]]) -> Sequence[float]:
        """One log-weight per beginning of a text; token ids behind the prompt's."""

    @abstractmethod
    def complete(self, outputs: Sequence[Sequence[int]]) -> Sequence[float]:
        """One log-weight per finished text; end tokens are left out."""


@dataclass(frozen=True)
class TextPotential(Potential):
    """A potential that reads text.

    whole: the log-weight of a finished text, or whether it may be (True is 0, False is -inf); beginning: the same of a
    text that will go on, None where it tells nothing. decode: ids to text; `bind` sets it.
    """

    whole: Score
    beginning: Score | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def bind(self, tokenizer: Tokenizer) -> TextPotential:
        return self if self.decode is not None else replace(self, decode=tokenizer.decode)

    def prefix(self, outputs: Sequence[Sequence[int]]) -> list[float]:
        return [0.0] * len(outputs) if self.beginning is None else self._scored(self.beginning, outputs)

    def complete(self, outputs: Sequence[Sequence[int]]) -> list[float]:
        return self._scored(self.whole, outputs)

    def _scored(self, score: Score, outputs: Sequence[Sequence[int]]) -> list[float]:
        if self.decode is None:
            raise SettingsError("a TextPotential reads text: search through `LM`, or give it decode")
        return [_log_weight(score(self.decode(output))) for output in outputs]


def _log_weight(value: Any) -> float:
    if isinstance(value, bool):
        return 0.0 if value else -math.inf
    weight = float(value)
    if math.isnan(weight) or weight == math.inf:
        raise SettingsError(f"a potential is a log-weight, a finite number or -inf, not {value!r}")
    return weight

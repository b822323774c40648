"""Scores by a function of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.scorer import Candidates, Scorer

Score = Callable[[str], float | bool]


@register("text", guarantee="as good as the function", requirements=("a function of the text",))
@dataclass(frozen=True)
class TextScore(Scorer):
    """Scores texts by functions of the text: a verifier, a rule of thumb, a program.

    Attributes:
        whole: Of a finished text, a number or whether it is right (1 or 0).
        beginning: Of a text that will go on; None where nothing is known of it.
        logarithmic: The numbers are logarithms of weights, of which -inf rules a text out; right is then 0 and wrong
            -inf.
        decode: Ids to text, for who has no tokenizer at hand.
    """

    whole: Score
    beginning: Score | None = None
    logarithmic: bool = False
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def prefixes(self) -> bool:
        return self.beginning is not None

    @property
    def log(self) -> bool:
        return self.logarithmic

    def score(self, candidates: Candidates) -> torch.Tensor:
        found = []
        for text, finished in zip(texts(candidates, self.decode, "text"), candidates.finished, strict=True):
            function = self.whole if finished or self.beginning is None else self.beginning
            value = function(text)
            found.append(self._of(value) if isinstance(value, bool | np.bool_) else float(value))
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def _of(self, right: bool | np.bool_) -> float:
        return (0.0 if right else -torch.inf) if self.logarithmic else float(right)


def texts(candidates: Candidates, decode: Callable[[Sequence[int]], str] | None, name: str) -> Sequence[str]:
    """The outputs as text.

    Raises:
        SettingsError: If there is no decoder.
    """
    decode = decode or candidates.decode
    if candidates.texts is not None:
        return candidates.texts
    if decode is None:
        raise SettingsError(f"the scorer {name} reads text: search through `LLM`, or give it decode")
    return [decode(output) for output in candidates.outputs]

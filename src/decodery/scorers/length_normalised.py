"""Scores that do not fall with the length of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer, scores_of

from .wrapper import Wrapper


@register("length-normalised", guarantee="the scorer itself at penalty 0", requirements=("a scorer of logarithms",))
@dataclass(frozen=True)
class LengthNormalised(Wrapper):
    """Divides logarithmic scores by length ** penalty, as beam search does.

    The length is in tokens, 1 at least.

    Attributes:
        scorer: What is normalised, or its name, as in length-normalised:scorer=log-probability(of=sum).
        penalty: 1 is the score per token, 0 leaves it as it is.
    """

    scorer: Scorer | str = "log-probability(of=sum)"
    penalty: float = 1.0

    def __post_init__(self) -> None:
        require_number("the penalty of length-normalised", self.penalty, least=0.0)
        super().__post_init__()
        if not self.inner.log:
            raise SettingsError("length-normalised divides logarithms: give it a scorer of these")

    @property
    def log(self) -> bool:
        return True

    @property
    def bounds(self) -> tuple[float, float]:
        least, most = self.inner.bounds
        # Divided by what may be large, a bound on either side of 0 only holds as it is, or as 0.
        return min(least, 0.0), max(most, 0.0)

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        found = yield from scores_of(self.inner, candidates)
        lengths = torch.tensor(
            [max(len(output), 1) for output in candidates.outputs], dtype=torch.float64, device="cpu"
        )
        return found.double().cpu() / lengths**self.penalty

"""Several scorers as one: their weights multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, gather
from decodery.step.scorer import Candidates, Scorer, log_scores, scores_of


@register("product", guarantee="0 where any factor is 0", requirements=("scorers of weights",))
@dataclass(frozen=True)
class Product(Scorer):
    """The logarithm of a product of weights, each to a power of its own.

    What a factor cannot say of a beginning counts as weight 1; a product scores beginnings where any factor does.
    Factors that ask models do so together.

    Attributes:
        factors: Scorers of weights or of their logarithms, or their names, as in product:factors=a/b(x=1).
        powers: One per factor, above 0; all 1 where there are none.
    """

    factors: tuple[Scorer | str, ...]
    powers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.factors or (self.powers and len(self.powers) != len(self.factors)):
            raise SettingsError("a product needs factors, and as many powers or none")
        for power in self.powers:
            require_number("a power of product", power, above=0.0)
        object.__setattr__(self, "factors", tuple(resolve("scorer", each) for each in self.factors))
        if not all(factor.answers for factor in self.scorers):
            raise SettingsError("a product scores answers, and so must each of its factors")

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        return self.factors  # type: ignore[return-value]

    @property
    def prefixes(self) -> bool:
        return any(factor.prefixes for factor in self.scorers)

    @property
    def writes(self) -> bool:
        return any(factor.writes for factor in self.scorers)

    @property
    def log(self) -> bool:
        return True

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged(factor.requirements for factor in self.scorers)

    def bind(self, tokenizer: Tokenizer) -> Product:
        return replace(self, factors=tuple(factor.bind(tokenizer) for factor in self.scorers))

    def fits(self, model: Reader) -> None:
        for factor in self.scorers:
            factor.fits(model)

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        found = yield from gather([self._logarithms(factor, candidates) for factor in self.scorers])
        powers = self.powers or (1.0,) * len(found)
        return torch.stack([power * each for power, each in zip(powers, found, strict=True)]).sum(dim=0)

    def _logarithms(self, factor: Scorer, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        total = torch.zeros(len(candidates), dtype=torch.float64, device="cpu")
        known = [n for n, finished in enumerate(candidates.finished) if finished or factor.prefixes]
        if known:
            some = candidates.of(known)
            scores = yield from scores_of(factor, some)
            total[known] = log_scores(factor, scores).cpu()
        return total

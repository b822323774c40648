"""Random models and rewards over few tokens, for which the results of searches have closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import draw, mix, uniform
from decodery.step.scorer import Candidates, Scorer

from .models import TableModel

_STREAM = 98


class Tabular(TableModel):
    """A random model over few tokens, with a uniformly drawn distribution for every text.

    Texts of a fixed length can be enumerated: see `law`.

    Args:
        vocab_size: Tokens.
        length: Tokens of the longest text.
        seed: Decides the distributions.
    """

    def __init__(self, vocab_size: int = 4, length: int = 4, seed: int = 0) -> None:
        if vocab_size**length > 1 << 14:
            raise SettingsError(f"{vocab_size}^{length} texts are too many to enumerate: at most {1 << 14}")
        super().__init__(vocab_size, order=length + 64, seed=seed)
        self.length = length

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        noise = uniform(self.seed, mix(*map(int, tokens)), torch.arange(self.vocab_size, device="cpu"), stream=_STREAM)
        # Exponential numbers, normalised, are an even draw from the simplex.
        return (-noise.log()).log().log_softmax(-1)

    def law(self, prompt: Sequence[int]) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        """All texts after the prompt, and their probabilities [texts] float64."""
        texts = list(itertools.product(range(self.vocab_size), repeat=self.length))
        rows = {
            begun: self.logits([*prompt, *begun])
            for at in range(self.length)
            for begun in {text[:at] for text in texts}
        }
        sums = [sum(float(rows[text[:at]][token]) for at, token in enumerate(text)) for text in texts]
        return texts, torch.tensor(sums, dtype=torch.float64, device="cpu").exp()


@dataclass(frozen=True)
class TabularReward(Scorer):
    """A score between 0 and 1 for every text and every prefix, from a hash of its tokens."""

    seed: int = 0

    bounds = 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        found = [draw(mix(self.seed, *candidates.prompt, *output), 1) for output in candidates.outputs]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def best_of_law(law: torch.Tensor, scores: torch.Tensor, n: int) -> torch.Tensor:
    """[texts] distribution of the best scored of n draws from `law`.

    F^n less what lies below, F being the scores' distribution. Of texts with equal scores the one drawn first wins, so
    that they share their chance as they share their mass.

    Args:
        law: [texts] probabilities.
        scores: [texts].
        n: Draws.
    """
    below = torch.stack([law[scores < score].sum() for score in scores])
    level = torch.stack([law[scores == score].sum() for score in scores])
    return ((below + level) ** n - below**n) * law / level

"""What a row of logits says of the token that was taken: computed once per token, from the model's own logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.topk import most_likely
from decodery.step.monitor import Row

__all__ = ["Signature", "entropy", "logprob"]

_LEAST = -1e4
"""What stands for less likely tokens, too."""


def largest(logits: torch.Tensor) -> tuple[float, float]:
    """The largest of a row's logits, and the log-probability of its token, in nats.

    Args:
        logits: [vocab], raw: before temperature, penalties and masks.
    """
    (ids,), (chances,) = most_likely(logits[None], 1)
    return float(logits[ids[0]]), math.log(chances[0])


def logprob(row: Row) -> float:
    """The log-probability of the taken token, in nats, by one native sweep over the logits.

    Args:
        row: The token, and the logits that it was taken by.
    """
    most, best = row.once(largest)
    return max(float(row.logits[row.token]) - most + best, _LEAST)


def entropy(logits: torch.Tensor) -> float:
    """The entropy of a row's distribution, in nats, without the rest of a `Signature`.

    Args:
        logits: [vocab], raw: before temperature, penalties and masks.
    """
    numbers = _numbers(logits)
    apart = np.maximum(numbers - numbers.max(), _LEAST)
    weights = np.exp(apart)
    total = weights.sum(dtype=np.float64)
    return float(np.log(total) - (weights * apart).sum(dtype=np.float64) / total)


def _numbers(logits: torch.Tensor) -> np.ndarray:
    """The logits as floats that numpy knows, on the host."""
    row = logits.cpu()
    return row.numpy() if row.dtype in (torch.float32, torch.float64) else row.float().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """Of one token, in nats.

    Renaming the tokens of the vocabulary changes nothing.

    Attributes:
        top: [k] the largest log-probabilities of the row, in descending order, 0 after the end of a smaller vocabulary.
        logprob: The taken token's.
        rank: How many tokens are more likely, as a share of the vocabulary.
        mean, deviation: Of all log-probabilities of the row.
        entropy: Of the distribution.
    """

    top: torch.Tensor
    logprob: float
    rank: float
    mean: float
    deviation: float
    entropy: float

    @classmethod
    def of(cls, logits: torch.Tensor, token: int, k: int) -> Signature:
        """The signature of one token.

        Args:
            logits: [vocab], raw: before temperature, penalties and masks.
        """
        # In double precision, so that the order in which a vocabulary is summed does not show.
        row = torch.log_softmax(logits.double(), dim=-1).clamp_min(_LEAST)
        taken = row[token]
        spread, mean = torch.std_mean(row, correction=0)
        top = row.topk(min(k, len(row))).values
        top = torch.nn.functional.pad(top, (0, k - len(top)))
        rank = int((row > taken).sum()) / len(row)
        return cls(top.cpu(), float(taken), rank, float(mean), float(spread), float(-(row.exp() * row).sum()))

    def numbers(self) -> torch.Tensor:
        """[k + 5] float32: top, then log-probability, rank, mean, deviation and entropy."""
        rest = torch.tensor(
            [self.logprob, self.rank, self.mean, self.deviation, self.entropy], dtype=torch.float32, device="cpu"
        )
        return torch.cat((self.top.float(), rest))

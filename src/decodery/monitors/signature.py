"""What a row of logits says of the token that was taken: computed once per token, from the model's own logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Signature"]

_LEAST = -1e4
"""What stands for less likely tokens, too."""


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

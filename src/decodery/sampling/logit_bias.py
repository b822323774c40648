"""Logit bias: a constant added to chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_count, require_number


@register("logit-bias", guarantee="lossy; an empty map is the identity")
@dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """Adds a bias to the logits of given token ids.

    Attributes:
        bias: Pairs (token id, logits to add), or a mapping; in practice -100 bans and 100 forces a token. As text:
            logit-bias:bias=12:-100/40:2.5
    """

    bias: tuple[tuple[int, float], ...] = ()
    stage = Stage.EDIT

    def __post_init__(self) -> None:
        given = self.bias.items() if isinstance(self.bias, Mapping) else self.bias
        pairs = tuple((token, amount) for token, amount in given)
        for token, amount in pairs:
            require_count("a token id of logit-bias", token)
            require_number(f"the logit-bias of token {token}", amount)
        if len({token for token, _ in pairs}) < len(pairs):
            raise SettingsError("logit-bias has a token twice: give each token one bias")
        object.__setattr__(self, "bias", pairs)

    @property
    def neutral(self) -> bool:
        return not any(amount for _, amount in self.bias)

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        tokens, amounts = zip(*self.bias, strict=True)
        if max(tokens) >= logits.shape[-1]:
            raise SettingsError(
                f"logit-bias names token {max(tokens)}, but the vocabulary ends at {logits.shape[-1] - 1}"
            )
        biased = logits.clone()
        biased[:, list(tokens)] += torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
        return biased

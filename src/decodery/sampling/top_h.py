"""Top-H: the most probable tokens, within a share of the model's own entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .entropy import entropy
from .logits_processor import Context, LogitsProcessor, Stage, require_count, require_number
from .masks import largest

_ROUNDING = 1 + 1e-9
"""What just meets the bound stays."""


@register(
    "top-h",
    paper="Top-H Decoding: Adapting the Creativity and Coherence with Bounded Entropy in Text Generation (2025)",
    guarantee="lossy; the truncated distribution has at most alpha times the entropy; alpha=1,top=0 is the identity",
)
@dataclass(frozen=True)
class TopH(LogitsProcessor):
    """Keeps the most probable tokens up to a given share of the distribution's entropy.

    Attributes:
        alpha: The share, above 0 and up to 1.
        top: Number of most probable tokens that are candidates, 0 for all.
        bound: The bounded value. "renormalised", as in the paper: the entropy of the kept tokens' own distribution.
            "partial", as in the authors' code and transformers: the kept tokens' terms of the candidates' entropy. Of n
            equal tokens the first one keeps n ** alpha, the second one alpha n.
    """

    alpha: float = 0.4
    top: int = 100
    bound: Literal["renormalised", "partial"] = "renormalised"
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("top-h", self.alpha, above=0.0, most=1.0)
        require_count("top of top-h", self.top)
        if self.bound not in ("renormalised", "partial"):
            raise SettingsError(f"top-h: bound must be renormalised or partial, not {self.bound!r}")

    @property
    def neutral(self) -> bool:
        return self.alpha == 1.0 and self.top == 0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        values, ids = largest(logits, self.top or logits.shape[-1])
        if self.bound == "partial":
            log_probs = values.double().log_softmax(dim=-1)
            spread = _terms(log_probs).cumsum(dim=-1)
            within = spread <= self.alpha * _ROUNDING * spread[:, -1:]
        else:
            # Entropies near 0, where the model is almost sure, need the digits of float64.
            everything = logits.double().log_softmax(dim=-1)
            log_probs = everything.gather(-1, ids)
            mass = log_probs.exp().cumsum(dim=-1)
            # The entropy of a renormalised prefix needs no second softmax.
            spread = _terms(log_probs).cumsum(dim=-1) / mass + mass.log()
            within = spread <= self.alpha * _ROUNDING * entropy(everything)
        within[:, 0] = True
        kept = within.cumprod(dim=-1).bool() & (log_probs.exp() > 0)
        return torch.full_like(logits, -torch.inf).scatter_(-1, ids, values.masked_fill(~kept, -torch.inf))


def _terms(log_probs: torch.Tensor) -> torch.Tensor:
    """-p log p; 0 for tokens without probability."""
    return -log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)

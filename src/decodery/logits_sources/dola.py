"""DoLa: the last layer's prediction, contrasted with that of an earlier layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.protocol import LanguageModel, OpenModel, Reader, is_open
from decodery.sampling.entropy import row_sums
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, OfOneModel, score
from decodery.step.logits_source import EXCLUDED, LogitsSource

_EARLY_ROWS = 512
"""Maximum number of rows of early logits in memory; with 50,000 tokens they take 100 MB."""


@register(
    "dola",
    paper="DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models (2023)",
)
@dataclass(frozen=True)
class DoLa(LogitsSource):
    """Contrasts the last layer's prediction with that of the earlier layer it differs most from.

    For each row it uses the candidate layer with the largest Jensen-Shannon divergence from the last layer. The authors
    add a repetition penalty of 1.2. Cost: the head is computed again per candidate layer and row.

    Attributes:
        layers: Candidate layers, as the number of layers that have run (0: the embeddings). "low" or "high" takes every
            second layer of the lower or upper half (of the outer 20 in models of more than 40), or give a list.
        plausible: Tokens below this share of the largest probability are excluded.
        published: Whether to compute as the published code and transformers do: without the final norm before the head
            of an early layer, and with divergences from the mean to each distribution instead of from each to the mean.
    """

    layers: Literal["low", "high"] | tuple[int, ...] = "low"
    plausible: float = 0.1
    published: bool = False

    requirements = Requirements(parts=True)
    provides = Provides(taps=True, keys=True)

    def __post_init__(self) -> None:
        require_number("the plausible of dola", self.plausible, above=0.0, most=1.0)

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        assert is_open(model)
        config = model.config
        found = candidates(self.layers, config.num_layers, config.tie_embeddings)
        return _Contrasting(model, found, self.plausible, self.published)


def candidates(layers: Literal["low", "high"] | tuple[int, ...], total: int, tied: bool) -> tuple[int, ...]:
    """Candidate layers of a model of `total`.

    Models with tied embeddings leave out the lowest ones, whose prediction only repeats the input.
    """
    if layers == "high":
        return tuple(range(total // 2 if total <= 40 else total - 20, total, 2))
    if layers == "low":
        first = 0 if not tied else min(2, max(total - 1, 0))
        return tuple(range(first, total // 2 if total <= 40 else 20, 2)) or (first,)
    if not layers or min(layers) < 0 or max(layers) >= total:
        raise SettingsError(f"dola needs layers between 0 and {total - 1}, not {'/'.join(map(str, layers)) or 'none'}")
    return tuple(layers)


@dataclass(frozen=True)
class _Contrasting(OfOneModel):
    model: OpenModel
    candidates: tuple[int, ...]
    plausible: float
    published: bool

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        scored = yield from score(self.model, segment, [*dict.fromkeys((*taps, *self.candidates))], role)
        rows = range(len(segment)) if segment.logit_rows is None else segment.logit_rows
        wanted = torch.tensor([*rows], dtype=torch.long, device="cpu")
        at_once, parts = max(1, _EARLY_ROWS // len(self.candidates)), []
        for first in range(0, len(wanted), at_once):
            index = wanted[first : first + at_once].to(self.device)
            # One call for all layers, because reading the head's weights is the main cost.
            states = torch.cat([scored.hidden[layer][index] for layer in self.candidates])
            early = self.model.project(states if self.published else self.model.final_norm(states))
            last = scored.logits[first : first + at_once]
            layered = early.view(len(self.candidates), len(last), -1)
            parts.append(contrast(last, layered, self.plausible, from_mean=self.published))
        if segment.cache is not None:
            count("early head rows", len(wanted) * len(self.candidates))
        return ForwardResult(torch.cat(parts) if parts else scored.logits, {tap: scored.hidden[tap] for tap in taps})


def contrast(last: torch.Tensor, early: torch.Tensor, plausible: float, *, from_mean: bool) -> torch.Tensor:
    """Contrasted scores [n, vocab] of the last layer's logits with those of early layers.

    Args:
        from_mean: See `DoLa.published`.
    """
    mature, premature = last.log_softmax(dim=-1), early.log_softmax(dim=-1)
    distances = torch.stack([_divergence(mature, layer, from_mean) for layer in premature])
    chosen = premature[distances.argmax(dim=0), torch.arange(len(last), device=last.device)]
    kept = mature >= mature.amax(dim=-1, keepdim=True) + math.log(plausible)
    return torch.where(kept, mature - chosen, mature - EXCLUDED)


def _divergence(p: torch.Tensor, q: torch.Tensor, from_mean: bool) -> torch.Tensor:
    """Twice the Jensen-Shannon divergence [n] in nats of two log-distributions [n, vocab], or its reverse."""
    mean = torch.logaddexp(p, q) - math.log(2)
    if from_mean:
        return row_sums(mean.exp() * (2 * mean - p - q))
    return row_sums(p.exp() * (p - mean) + q.exp() * (q - mean))

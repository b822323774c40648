"""CCD: positions are chosen by distributions that are averaged over the last passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import UnmaskingPolicy
from .view import Commit, View

Distributions = Mapping[int, torch.Tensor]
"""By position: [vocab] probabilities of the most confident positions of one pass."""


class Averages(NamedTuple):
    """Positions of a pass with their average distributions, for the entropy of the average."""

    indices: np.ndarray
    probabilities: torch.Tensor
    entropy: np.ndarray


@register(
    "ccd",
    paper="Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (2025)",
    guarantee="tokens that contexts agree on are written first; adaptive writes several per pass independently of "
    "each other",
)
@dataclass(frozen=True)
class CCD(UnmaskingPolicy):
    """Averages the most confident distributions over passes and writes where entropy is lowest.

    The entropy of the average is the mean entropy plus the disagreement between contexts. Memory: history * places
    distributions.

    Attributes:
        places: Number of most confident positions whose distributions a pass stores.
        history: Number of earlier passes that are averaged with the current one (published: 3 with Dream, 2 with
            LLaDA).
        adaptive: False writes one token per pass. True (CCD-DS) writes all positions whose average has no more entropy
            than the lowest entropy of the pass, or than `floor` nats. The paper gives no value for this
            threshold, so this one is ours. The released code instead compares proposals with those of the last pass,
            see `ccd-agreement`.
        floor: Entropy in nats up to which CCD-DS writes in any case.
    """

    places: int = 4
    history: int = 2
    adaptive: bool = False
    floor: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places < 1 or self.history < 1:
            raise SettingsError(
                f"ccd: places and history must be at least 1, not places={self.places} and history={self.history}"
            )
        if not self.floor >= 0:
            raise SettingsError(f"ccd: floor is an entropy in nats and must be 0 or more, not {self.floor}")

    def select(self, view: View, memory: Any) -> tuple[Commit, tuple[Distributions, ...]]:
        past: tuple[Distributions, ...] = memory or ()
        surest = np.sort(view.order[: self.places])
        now = view.logprobs[torch.from_numpy(surest)].exp()
        kept = dict(zip(view.positions[surest].tolist(), now, strict=True))
        found = averaged(surest, view.positions[surest].tolist(), now, past)
        commit = view.top(1)
        if found is not None:
            if self.adaptive:
                limit = max(float(view.entropy.min()), self.floor)
                chosen = np.flatnonzero(found.entropy <= limit)
            else:
                chosen = found.entropy.argsort(kind="stable")[:1]
            if len(chosen):
                tokens = found.probabilities[torch.from_numpy(chosen)].argmax(dim=-1).cpu().numpy()
                commit = Commit(view.positions[found.indices[chosen]], tokens)
        return commit, (*past, kept)[-self.history :]


def averaged(
    indices: np.ndarray, positions: list[int], now: torch.Tensor, past: tuple[Distributions, ...]
) -> Averages | None:
    """Average the distributions of the positions that past passes stored, over passes.

    Args:
        indices: [k] rows of the current view.
        positions: [k] their positions.
        now: [k, vocab] their current probabilities.
        past: Distributions that past passes stored.

    Returns:
        The rows that at least one past pass stored, with their averages; None where there is none.
    """
    rows, means = [], []
    for row, place in enumerate(positions):
        known = [each[place] for each in past if place in each]
        if known:
            rows.append(row)
            means.append(torch.stack([*known, now[row]]).mean(dim=0))
    if not rows:
        return None
    mean = torch.stack(means)
    entropy = torch.special.entr(mean).sum(dim=-1).double().cpu().numpy()
    return Averages(indices[rows], mean, entropy)

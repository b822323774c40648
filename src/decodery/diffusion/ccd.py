"""CCD: what the model has said of a place over the last passes decides, not what it says now."""

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

Laws = Mapping[int, torch.Tensor]
"""By position: [vocab] probabilities of the surest places of one pass."""


class Likeliest(NamedTuple):
    """The places of a pass whose distributions average to little entropy, and those averages."""

    indices: np.ndarray
    laws: torch.Tensor
    entropy: np.ndarray


@register(
    "ccd",
    paper="Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (2025)",
    guarantee="tokens that contexts agree on are written first; adaptive writes several a pass that do not know of "
    "each other",
)
@dataclass(frozen=True)
class CCD(UnmaskingPolicy):
    """Averages the most confident distributions over passes and writes where entropy is lowest.

    The entropy of the average is the mean entropy and what contexts disagree on. Memory: history * places
    distributions.

    Attributes:
        places: How many of the most confident a pass remembers.
        history: Passes that are remembered, the current one not counted (published: 3 with Dream, 2 with LLaDA).
        adaptive: False writes one token a pass; True, CCD-DS, all places whose average has no more entropy than the
            most confident distribution now, or than `floor` nats: the paper names a threshold and not its value, so
            this one is ours. This is the paper's form; the released code compares proposals with those of the last
            pass.
        floor: Entropy in nats up to which CCD-DS writes in any case.
    """

    places: int = 4
    history: int = 2
    adaptive: bool = False
    floor: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places < 1 or self.history < 1:
            raise SettingsError(f"ccd needs at least one place and one pass, not {self.places} and {self.history}")
        if not self.floor >= 0:
            raise SettingsError(f"ccd: floor is an entropy in nats, so it is not {self.floor}")

    def select(self, view: View, memory: Any) -> tuple[Commit, tuple[Laws, ...]]:
        past: tuple[Laws, ...] = memory or ()
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
                tokens = found.laws[torch.from_numpy(chosen)].argmax(dim=-1).cpu().numpy()
                commit = Commit(view.positions[found.indices[chosen]], tokens)
        return commit, (*past, kept)[-self.history :]


def averaged(indices: np.ndarray, positions: list[int], now: torch.Tensor, past: tuple[Laws, ...]) -> Likeliest | None:
    """The mean distributions, over past passes and now, of those places that the past knows.

    None where it knows none.

    Args:
        now: [k, vocab] of `positions` [k].
    """
    rows, laws = [], []
    for row, place in enumerate(positions):
        known = [each[place] for each in past if place in each]
        if known:
            rows.append(row)
            laws.append(torch.stack([*known, now[row]]).mean(dim=0))
    if not rows:
        return None
    mean = torch.stack(laws)
    entropy = torch.special.entr(mean).sum(dim=-1).double().cpu().numpy()
    return Likeliest(indices[rows], mean, entropy)

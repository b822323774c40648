"""Momentum decoding: the most likely token, with a penalty (resistance) on repeated runs of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements

from .history import Repeats
from .logits_processor import Context, LogitsProcessor, Stage, require_count, require_number
from .masks import largest


@register(
    "momentum",
    paper="Momentum Decoding: Open-ended Text Generation As Graph Exploration (2022)",
    guarantee="lossy and deterministic; alpha=0 is greedy decoding",
)
@dataclass(frozen=True)
class Momentum(LogitsProcessor):
    """Takes the token of the top k with the highest probability minus alpha times its resistance.

    The text is a graph of tokens. A token's depth is the length of the longest run (the last tokens and the token
    itself) that the text already contains, 0 if the token never occurred. No token is drawn, so a temperature has no
    effect. Where all k tokens are forbidden, the most likely one is taken. The default resistance is that of the
    authors' code for English models.

    Attributes:
        k: Number of most likely tokens that are candidates.
        alpha: Weight of the resistance.
        resistance: Resistance by depth; the last entry is for all greater depths, and inf forbids the token.
    """

    k: int = 5
    alpha: float = 0.2
    resistance: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    stage = Stage.EDIT
    stateful = True
    hears_logprobs = False
    requirements = Requirements(mask=True)
    provides = Provides()

    def __post_init__(self) -> None:
        require_count("the k of momentum", self.k)
        require_number("the alpha of momentum", self.alpha, least=0.0)
        object.__setattr__(self, "resistance", tuple(self.resistance))
        if self.k < 1 or not self.resistance or not all(each >= 0 for each in self.resistance):
            raise SettingsError("momentum needs k >= 1 and a resistance of numbers, 0 or more, for depths 0, 1, ...")

    @property
    def neutral(self) -> bool:
        return self.alpha == 0.0

    @property
    def greedy(self) -> bool:
        return True

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or not contexts:
            return logits
        values, ids = largest(logits, self.k)
        probs = (values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        fines = [self._fines(context.state, row) for context, row in zip(contexts, ids.tolist(), strict=True)]
        scores = probs - torch.tensor(fines, dtype=probs.dtype, device=probs.device)
        scores = scores.masked_fill(values == -torch.inf, -torch.inf)
        forbidden = scores.amax(dim=-1, keepdim=True) == -torch.inf
        return torch.full_like(logits, -torch.inf).scatter_(-1, ids, torch.where(forbidden, probs, scores))

    def init(self, prompt: Sequence[int]) -> Repeats:
        return Repeats.of(prompt)

    def advance(self, state: Repeats, token: int, logprob: float) -> Repeats:
        return state.add(token)

    def _fines(self, seen: Repeats, tokens: list[int]) -> list[float]:
        resistances = [self.resistance[min(depth, len(self.resistance) - 1)] for depth in depths(seen, tokens)]
        # 0 times infinity cannot occur: alpha is above 0.
        return [math.inf if math.isinf(each) else self.alpha * each for each in resistances]


def depths(seen: Repeats, tokens: Sequence[int]) -> list[int]:
    """Length of the run that each of `tokens` would repeat, itself included; 0 where it is new."""
    ids, lengths = seen.followers(1)
    runs = dict(zip(ids.tolist(), (np.asarray(lengths) + 1).tolist(), strict=True))
    return [runs.get(token, int(seen.occurs(token))) for token in tokens]

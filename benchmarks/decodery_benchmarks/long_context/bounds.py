"""The two lines that belong into every picture: what keeps tokens evenly, and what is told where the answer is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.kv_cache.after_prompt import Compressing, Prompt

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Uniform(Compressing):
    """Keeps the tokens of a prompt at even distances, and the last one."""

    budget: float = 1.0

    def watched(self, prompt: int) -> int:
        return 1

    def scores(self, seen: Prompt) -> np.ndarray:
        heads, length = seen.keys.shape[:2]
        # The golden ratio spreads any number of first choices evenly.
        scores = -((np.arange(length) * _GOLDEN) % 1.0)
        scores[-1] = np.inf
        return np.broadcast_to(scores, (heads, length))


@dataclass(frozen=True)
class Oracle(Compressing):
    """Keeps the first tokens, those of `span`, then the newest."""

    budget: float = 1.0
    span: tuple[int, int] = (0, 0)

    def watched(self, prompt: int) -> int:
        return 1

    def scores(self, seen: Prompt) -> np.ndarray:
        heads, length = seen.keys.shape[:2]
        scores = np.arange(length, dtype=np.float64)
        scores[slice(*self.span)] = np.inf
        scores[:4] = np.inf
        return np.broadcast_to(scores, (heads, length))

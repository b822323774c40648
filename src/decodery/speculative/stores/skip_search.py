"""The search for the sublayers that a model can skip best: random sets, and sets from a Gaussian process."""

from __future__ import annotations

import numpy as np

from decodery.core.gaussian_process import GaussianProcess
from decodery.models.trained.skips import sublayers, switches
from decodery.step.drafter_memory import Guarded

_KAPPA = 2.5
_CANDIDATES = 2048


class SkipSearch(Guarded):
    """Sets of `count` skipped sublayers of `layers` layers, as 0/1 vectors, with their scores.

    Vectors are over `switches(layers)`. Source: SWIFT (2024).

    Args:
        best: The set in use.
        matchness: Its share of tokens that the model skipping it got right, 0 before any was tried, of `tried` sets so
            far.
        stale: Proposals since the last one that was better.
    """

    def __init__(self, layers: int, ratio: float, *, bayes: int = 25, seed: int = 0) -> None:
        super().__init__()
        self.layers, self.bayes = layers, bayes
        self.size = len(switches(layers))
        self.count = int(self.size * ratio)
        self.best = self._first()
        self.matchness = 0.0
        self.stale = self.proposed = 0
        self.history: list[float] = []
        self._sets: list[np.ndarray] = []
        self._random = np.random.default_rng(seed)

    @property
    def tried(self) -> int:
        return len(self._sets)

    @property
    def skip(self) -> frozenset[str]:
        """The best set so far, as a route names it."""
        return sublayers(self.best, self.layers)

    def over(self, proposals: int, patience: int, enough: float) -> bool:
        """Whether there is nothing more to look for."""
        return (
            self.count in (0, self.size)
            or self.matchness > enough
            or self.proposed >= proposals
            or self.stale > patience
        )

    def propose(self) -> np.ndarray:
        """[size] bool: a set to be tried, uniformly drawn; every `bayes`-th time the most promising one."""
        with self.lock:
            self.proposed += 1
            if self.proposed % self.bayes == 0 and self._sets:
                return self._promising()
            return self._drawn(1)[0]

    def register(self, chosen: np.ndarray, matchness: float) -> None:
        """Learn how a set did; a strictly better one is used from now on."""
        with self.lock:
            self._sets.append(chosen)
            better = matchness > self.matchness
            self.stale = 0 if better else self.stale + 1
            if better:
                self.best, self.matchness = chosen, matchness
            self.history.append(matchness)

    def _first(self) -> np.ndarray:
        """Every odd layer's sublayers, as many as are to be skipped; even ones where those are too few."""
        odd = np.array([int(name.partition(".")[2]) % 2 == 1 for name in switches(self.layers)], dtype=bool)
        # Attention and MLP of a layer stand half the list apart: taken in turns, front to back.
        order = np.arange(self.size).reshape(2, -1).T.ravel() if self.size else np.zeros(0, dtype=np.int64)
        order = np.concatenate((order[odd[order]], order[~odd[order]]))
        chosen = np.zeros(self.size, dtype=bool)
        chosen[order[: self.count]] = True
        return chosen

    def _drawn(self, n: int) -> np.ndarray:
        """[n, size] uniform sets of the right size."""
        order = self._random.random((n, self.size)).argsort(axis=1)
        return order < self.count

    def _promising(self) -> np.ndarray:
        """The set with the highest upper confidence bound among random ones and neighbours of the best."""
        process = GaussianProcess(np.array(self._sets, dtype=np.float64), np.array(self.history))
        near = np.repeat(self.best[None], _CANDIDATES, axis=0)
        rows = np.arange(_CANDIDATES)
        for _ in range(2):
            # One sublayer in, one out.
            into = self._random.random(near.shape) - near
            out = self._random.random(near.shape) - ~near
            i, o = into.argmax(axis=1), out.argmax(axis=1)
            near[rows, i], near[rows, o] = True, False
        found = np.concatenate((self._drawn(_CANDIDATES), near))
        chosen: np.ndarray = found[int(process.upper(found.astype(np.float64), _KAPPA).argmax())]
        return chosen

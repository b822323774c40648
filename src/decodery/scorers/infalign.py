"""InfAlign: rewards calibrated against what the model itself writes, and transformed for how the texts are used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import charged
from decodery.core.registry import register
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer, scores_of

from .wrapper import Wrapper

_GRID, _ROUNDS, _STEP = 2000, 2000, 0.5
_NEAR = 1e-9

__all__ = ["transform", "transformed", "win_rate"]

Transform = Literal["identity", "exp", "best-of", "worst-of"]


@register(
    "infalign",
    paper="InfAlign: Inference-aware Language Model Alignment (2024)",
    guarantee="the order of the scorer itself; under the model's own distribution the calibrated reward is uniform",
    requirements=("a scorer of answers", "a prompt that is text or chat"),
)
@dataclass(frozen=True)
class InfAlign(Wrapper):
    """Scores a text by the share of the model's own answers that another scorer finds worse, transformed.

    The score is the logarithm of a weight: a vote or a resampling by it follows the tilted distribution of the model.
    Best-of-n does not change under it, for the order of texts stays.

    Attributes:
        scorer: Of answers.
        samples: Answers of the model to the same prompt, at seeds of their own, drawn and scored once per search; equal
            scores count half (the paper has about 100).
        transform: "identity" is the calibrated reward C in [0, 1] itself; "exp" is exp(t C); "best-of" and "worst-of"
            are the rewards under which the exponential tilt is the best policy for who takes the best, or worst, of n.
        n: Of how many answers the best or worst is taken, by "best-of" and "worst-of".
        t: Exponent of "exp".
        beta: What they are divided by.
    """

    scorer: Scorer | str = "llm-judge"
    samples: int = 32
    transform: Transform = "best-of"
    n: int = 4
    t: float = 10.0
    beta: float = 1.0

    @property
    def writes(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("the t of infalign", self.t)
        require_number("the beta of infalign", self.beta, above=0.0)
        if min(self.samples, self.n) < 1 or not self.inner.answers:
            raise SettingsError("infalign needs samples and n of at least 1, and a scorer of answers")
        if self.inner.requirements.taps:
            raise SettingsError("infalign keeps no hidden states of its samples: give a scorer that reads texts")

    @property
    def prefixes(self) -> bool:
        return False

    @property
    def log(self) -> bool:
        return True

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        rewards = yield from scores_of(self.inner, candidates)
        drawn = yield from self._drawn(candidates)
        own = rewards.double().cpu().numpy()
        calibrated = ((drawn < own[:, None]).mean(axis=1) + (drawn == own[:, None]).mean(axis=1) / 2).clip(0, 1)
        found = transformed(calibrated, self.transform, n=self.n, t=self.t, beta=self.beta)
        return torch.from_numpy(found / self.beta)

    def _drawn(self, candidates: Candidates) -> ForwardCoroutine[np.ndarray]:
        """Sorted rewards [samples] of the model's own answers, remembered as long as the search that asks."""
        calls = candidates.calls
        if calls is None:
            raise SettingsError("infalign draws answers of its own, and this prompt is token ids: search through `LLM`")
        if self not in calls.remembered:
            texts = yield from calls.reference(self.samples)
            charged().scorer_calls += len(texts)
            answers = Candidates(
                candidates.prompt,
                [[token for token in seq.generated if token not in seq.request.eos_ids] for seq in texts],
                [True] * len(texts),
                texts=[seq.text.text for seq in texts if seq.text is not None],
                decode=candidates.decode,
                model=candidates.model,
                calls=calls,
            )
            found = yield from scores_of(self.inner, answers)
            calls.remembered[self] = np.sort(found.double().cpu().numpy())
        return calls.remembered[self]


def transformed(calibrated: np.ndarray, how: Transform, *, n: int, t: float, beta: float) -> np.ndarray:
    """What calibrated rewards [m] count by a transform of `InfAlign`."""
    if how == "identity":
        return calibrated
    if how == "exp":
        return np.exp(t * calibrated)
    grid, values, _ = transform(n, beta, worst=how == "worst-of")
    return np.interp(calibrated, grid, values)


@lru_cache(maxsize=64)
def transform(n: int, beta: float, *, worst: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transformed rewards whose exponential tilt is the best policy under best-of-n on both sides.

    R is the derivative of the win rate, N^2 * integral_0^v (u F(u))^(N-1) du, or with 1 - u and 1 - F, found by a
    damped fixed point from f = 1.

    Args:
        worst: Both by the worst of n.

    Returns:
        The grid [2000] of calibrated rewards, the reward R at each, and the density f of the tilted policy there, which
        is exp(R / beta) up to its sum.
    """
    grid = (np.arange(_GRID) + 0.5) / _GRID
    density, step, before = np.ones(_GRID), _STEP, np.inf
    for _ in range(_ROUNDS):
        reward = _reward(density, grid, n, worst)
        tilted = np.exp((reward - reward.max()) / beta)
        tilted /= tilted.mean()
        change = float(np.abs(tilted - density).mean())
        if change < _NEAR:
            break
        # The sharper the tilt, the more a round overshoots: it would go to and fro for ever.
        step, before = step if change < before else step / 2, change
        density = (1 - step) * density + step * tilted
    return grid, _reward(density, grid, n, worst), density


def _reward(density: np.ndarray, grid: np.ndarray, n: int, worst: bool) -> np.ndarray:
    mean = _power(1 - density.cumsum() / _GRID, density, n) if worst else _power(_below(density), density, n)
    rising = n**2 * (1 - grid if worst else grid) ** (n - 1) * mean
    found: np.ndarray = (np.cumsum(rising) - rising / 2) / _GRID
    return found


def win_rate(density: np.ndarray, n: int, *, worst: bool = False) -> float:
    """How often the best (or worst) of n draws of a policy beats that of the model.

    Args:
        density: [grid], of mean 1.
    """
    grid = (np.arange(len(density)) + 0.5) / len(density)
    if worst:
        law = n * _power(1 - density.cumsum() / len(density), density, n) * density
        return float((law * (1 - (1 - grid) ** n)).mean())
    return float((n * _power(_below(density), density, n) * density * grid**n).mean())


def _below(density: np.ndarray) -> np.ndarray:
    """What lies below each place of the grid."""
    found: np.ndarray = (density.cumsum() - density) / len(density)
    return found


def _power(least: np.ndarray, density: np.ndarray, n: int) -> np.ndarray:
    """Means over the places of the grid of F^(n - 1), where F rises by `density` from `least`.

    A sharp distribution lies in so few places that F in their middles would not do.
    """
    rise = density / len(density)
    whole = ((least + rise).clip(0, 1) ** n - least.clip(0, 1) ** n) / (n * np.maximum(rise, 1e-9))
    return np.where(rise > 1e-9, whole, least.clip(0, 1) ** (n - 1))

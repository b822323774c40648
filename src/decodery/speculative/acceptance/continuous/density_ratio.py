"""The rule for continuous values: speculative sampling with densities in place of probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from decodery.core import noise
from decodery.core.errors import SettingsError
from decodery.core.registry import register

_BLOCK = 64
"""Draws from the residual tried at a time."""


class Density(Protocol):
    """What a model says of its next value, a point of R^d.

    Attributes:
        exact: Whether `log_prob` is the density of what `sample` draws.
        numbers: How many uniform numbers a draw takes.
    """

    @property
    def exact(self) -> bool: ...

    @property
    def numbers(self) -> int: ...

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """[n] natural logarithms of the density at x [n, d]."""
        ...

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        """[n, d] draws that are functions of `uniforms` [n, numbers], numbers in (0, 1)."""
        ...

    def along(self, uniforms: np.ndarray) -> Density:
        """The density given the noise [numbers] of one draw, of which it may be the last step.

        Itself where exact.
        """
        ...


@dataclass(frozen=True)
class Emitted:
    """What one step emits.

    Attributes:
        accepted: How many drafted values.
        value: [d], the one after them.
        exhausted: 1 where the tries ran out.
    """

    accepted: int
    value: np.ndarray
    exhausted: int = 0


def acceptance(p: Density, q: Density, x: np.ndarray) -> np.ndarray:
    """[n] probabilities min(1, p / q) of accepting x [n, d], drawn from q."""
    return np.exp(np.minimum(0.0, p.log_prob(x) - q.log_prob(x)))


def thinning(p: Density, q: Density, y: np.ndarray) -> np.ndarray:
    """[n] probabilities max(0, 1 - q / p) of keeping y [n, d] drawn from p.

    What is kept follows norm((p - q)+).
    """
    return -np.expm1(np.minimum(0.0, q.log_prob(y) - p.log_prob(y)))


def uniforms(seed: int, position: int, first: int, rows: int, numbers: int, stream: int) -> np.ndarray:
    """[rows, numbers] of the request's own noise, those of row i always the same."""
    counted = torch.arange(first * numbers, (first + rows) * numbers, device="cpu")
    return noise.uniform(seed, position, counted, stream).numpy().reshape(rows, numbers)


def draw_residual(p: Density, q: Density, seed: int, position: int, tries: int) -> tuple[np.ndarray, bool]:
    """A draw [d] from norm((p - q)+) by thinning draws from p, and whether all tries failed.

    1 / TV(p, q) draws are expected. Where none of `tries` is kept the last one is returned.
    """
    done, last = 0, np.empty(0)
    while done < tries:
        rows = min(_BLOCK, tries - done)
        y = p.sample(uniforms(seed, position, done, rows, p.numbers, noise.RESIDUAL))
        # The uniform that keeps draw i stands beside the one that accepted the draft, which is number 0.
        keep = uniforms(seed, position, done + 1, rows, 1, noise.ACCEPT)[:, 0] < thinning(p, q, y)
        if keep.any():
            return y[keep.argmax()], False
        done, last = done + rows, y[-1]
    return last, True


@register(
    "density-ratio",
    paper="Continuous Speculative Decoding for Autoregressive Image Generation (2024)",
    guarantee="distribution-identical where densities are exact, up to 1 / (e tries) in total variation per value; "
    "lossy with surrogate=true",
    lossless=True,
    requirements=("models of continuous values (decode.continuous)",),
)
@dataclass(frozen=True)
class DensityRatio:
    """Accepts a drafted value x with probability min(1, p(x) / q(x)), else draws from norm((p - q)+).

    The published code also divides distances by 42^2, applies that ratio of widths inverted, and keeps values after a
    rejected one; none of this is done here.

    Attributes:
        tries: How many draws from p may be thinned for one draw of that; the published code has 100.
        surrogate: Also takes models without an exact density, such as diffusion heads. Their ratio is that of the last
            steps' Gaussians along two trajectories with the same noise, times the earlier steps' ratio of widths; what
            is emitted is then close to the target's distribution and not equal to it.
    """

    tries: int = 10_000
    surrogate: bool = False

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise SettingsError(f"density-ratio needs tries >= 1, not {self.tries}")

    def choose(
        self, drafted: np.ndarray, p: Sequence[Density], q: Sequence[Density], seed: int, position: int
    ) -> Emitted:
        """How many of `drafted` [n, d] are accepted, and the value after them.

        Args:
            p: [n + 1] densities of the target, before each drafted value and after the last.
            q: [n] of the drafter, which drew value i with the noise of output position `position + i`.
        """
        for number, x in enumerate(drafted):
            at = position + number
            target, draft = self._pair(p[number], q[number], seed, at)
            if noise.draw(seed, at, 0, stream=noise.ACCEPT) >= acceptance(target, draft, x[None])[0]:
                value, exhausted = draw_residual(target, draft, seed, at, self.tries)
                return Emitted(number, value, int(exhausted))
        return Emitted(len(drafted), draw(p[len(drafted)], seed, position + len(drafted)))

    def _pair(self, p: Density, q: Density, seed: int, position: int) -> tuple[Density, Density]:
        if p.exact and q.exact:
            return p, q
        if not self.surrogate:
            raise SettingsError(
                "density-ratio is exact only where both models' densities are: pass surrogate=True for a close but "
                "lossy rule"
            )
        # Both draw as many numbers, or their trajectories could not share them.
        return tuple(  # type: ignore[return-value]
            each.along(uniforms(seed, position, 0, 1, each.numbers, noise.TOKEN)[0]) for each in (p, q)
        )


def draw(law: Density, seed: int, position: int) -> np.ndarray:
    """[d] the value that the request's noise draws at an output position, by the drafter as by the target."""
    return law.sample(uniforms(seed, position, 0, 1, law.numbers, noise.TOKEN))[0]


def worst_case(tries: int) -> float:
    """Total variation that running out of tries can cause: max over t of t (1 - t)^tries."""
    return 1.0 / (math.e * tries)

"""Small autoregressive models of continuous values whose densities are known in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..verify.density_ratio import Density


@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians. weights: [k]; means, widths (standard deviations, axis by axis): [k, d]."""

    weights: np.ndarray
    means: np.ndarray
    widths: np.ndarray

    exact = True

    @property
    def numbers(self) -> int:
        """One to choose the component, two for each coordinate's normal."""
        return 1 + 2 * self.means.shape[1]

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        scaled = (x[:, None] - self.means) / self.widths
        parts = -0.5 * (scaled**2 + np.log(2 * np.pi)).sum(axis=2) - np.log(self.widths).sum(axis=1)
        return np.logaddexp.reduce(parts + np.log(self.weights), axis=1)

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        chosen = np.searchsorted(np.cumsum(self.weights), uniforms[:, 0]).clip(max=len(self.weights) - 1)
        return self.means[chosen] + self.widths[chosen] * normals(uniforms[:, 1:])

    def along(self, uniforms: np.ndarray) -> Density:
        return self


def normals(uniforms: np.ndarray) -> np.ndarray:
    """[n, m] standard normals of [n, 2 m] uniform numbers (Box and Muller)."""
    radius, angle = uniforms[:, 0::2], uniforms[:, 1::2]
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)


@dataclass(frozen=True)
class MixtureChain:
    """Each value is drawn from a mixture whose means are linear in the value before it (zeros before the first).

    weights: [k]; slopes: [k, d, d]; offsets, widths: [k, d].
    """

    weights: np.ndarray
    slopes: np.ndarray
    offsets: np.ndarray
    widths: np.ndarray

    @classmethod
    def random(cls, size: int, components: int, seed: int) -> MixtureChain:
        random = np.random.default_rng(seed)
        return cls(
            random.dirichlet(np.full(components, 3.0)),
            0.6 * random.standard_normal((components, size, size)) / size**0.5,
            random.standard_normal((components, size)),
            0.6 + 0.6 * random.random((components, size)),
        )

    def nearby(self, distance: float, seed: int) -> MixtureChain:
        """A draft model: the same with offsets moved by normals of that size, and a little wider."""
        moved = distance * np.random.default_rng(seed).standard_normal(self.offsets.shape)
        return MixtureChain(self.weights, self.slopes, self.offsets + moved, self.widths * (1 + 0.3 * distance))

    def densities(self, values: np.ndarray, first: int) -> Sequence[Density]:
        before = np.concatenate([np.zeros((1, self.offsets.shape[1])), values])[first:]
        means = np.einsum("kij,nj->nki", self.slopes, before) + self.offsets
        return [Mixture(self.weights, each, self.widths) for each in means]

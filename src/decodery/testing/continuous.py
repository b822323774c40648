"""Small autoregressive models of continuous values whose densities are known in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decodery.speculative.acceptance.continuous.density_ratio import Density


@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians.

    Attributes:
        weights: [k].
        means: [k, d].
        widths: [k, d] standard deviations, axis by axis.
    """

    weights: np.ndarray
    means: np.ndarray
    widths: np.ndarray

    exact = True

    @property
    def numbers(self) -> int:
        """Number of uniform numbers per draw: one for the component, two for each coordinate's normal."""
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
class Diffusion:
    """A diffusion head that draws from a mixture in `steps` steps, each with optimal mean and width.

    Its draws have no density in closed form, but the last step of a trajectory has one. Source of the widths:
    Analytic-DPM (2022).
    """

    mixture: Mixture
    steps: int = 10

    exact = False

    @property
    def numbers(self) -> int:
        """Number of uniform numbers per draw: two for each normal, at the start and at every step."""
        return 2 * self.mixture.means.shape[1] * (self.steps + 1)

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError("what a diffusion head draws has no density; see along")

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        noise = normals(uniforms).reshape(len(uniforms), self.steps + 1, -1)
        mean, width, _ = self._last_step(noise)
        return mean + width * noise[:, -1]

    def along(self, uniforms: np.ndarray) -> LastStep:
        mean, width, earlier = self._last_step(normals(uniforms[None]).reshape(1, self.steps + 1, -1))
        return LastStep(mean[0], width[0], float(earlier[0]))

    def _last_step(self, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean and width [n, d] of the last step, and [n] the logarithm of the earlier widths' product."""
        kept = np.cos(np.linspace(0, np.pi / 2, self.steps + 2)[:-1]) ** 2
        x, earlier = noise[:, 0], np.zeros(len(noise))
        for step in range(self.steps, 0, -1):
            guess, spread = self._denoised(x, kept[step])
            ratio = kept[step] / kept[step - 1]
            to_guess = np.sqrt(kept[step - 1]) * (1 - ratio) / (1 - kept[step])
            stay = np.sqrt(ratio) * (1 - kept[step - 1]) / (1 - kept[step])
            mean = to_guess * guess + stay * x
            narrow = (1 - ratio) * (1 - kept[step - 1]) / (1 - kept[step])
            width = np.sqrt(narrow + to_guess**2 * spread)
            if step > 1:
                x = mean + width * noise[:, self.steps - step + 1]
                earlier += np.log(width).sum(axis=1)
        return mean, width, earlier

    def _denoised(self, x: np.ndarray, kept: float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance [n, d] of the mixture's value after x [n, d], of whose variance the share `kept` is it."""
        centres, widths = np.sqrt(kept) * self.mixture.means, kept * self.mixture.widths**2 + 1 - kept
        apart = x[:, None] - centres
        log_share = np.log(self.mixture.weights) - 0.5 * (apart**2 / widths + np.log(widths)).sum(axis=2)
        share = np.exp(log_share - np.logaddexp.reduce(log_share, axis=1, keepdims=True))[..., None]
        means = self.mixture.means + np.sqrt(kept) * self.mixture.widths**2 / widths * apart
        guess = (share * means).sum(axis=1)
        inner = self.mixture.widths**2 * (1 - kept) / widths
        return guess, (share * (inner + means**2)).sum(axis=1) - guess**2


@dataclass(frozen=True)
class LastStep:
    """The last step of a trajectory, a Gaussian of mean and width [d].

    It is over the product exp(earlier) of all others.
    """

    mean: np.ndarray
    width: np.ndarray
    earlier: float

    exact = False

    @property
    def numbers(self) -> int:
        return 2 * len(self.mean)

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        scaled = (x - self.mean) / self.width
        normal = -0.5 * (scaled**2 + np.log(2 * np.pi)).sum(axis=1) - np.log(self.width).sum()
        return normal - self.earlier

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        return self.mean + self.width * normals(uniforms)

    def along(self, uniforms: np.ndarray) -> LastStep:
        return self


@dataclass(frozen=True)
class MixtureChain:
    """A chain whose values are drawn from mixtures with means linear in the value before.

    The value before the first is zero.

    Attributes:
        weights: [k].
        slopes: [k, d, d].
        offsets, widths: [k, d].
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
        """Make a draft model: this chain, slightly wider, its offsets shifted by normals of `distance`."""
        moved = distance * np.random.default_rng(seed).standard_normal(self.offsets.shape)
        return MixtureChain(self.weights, self.slopes, self.offsets + moved, self.widths * (1 + 0.3 * distance))

    def densities(self, values: np.ndarray, first: int) -> Sequence[Density]:
        before = np.concatenate([np.zeros((1, self.offsets.shape[1])), values])[first:]
        means = np.einsum("kij,nj->nki", self.slopes, before) + self.offsets
        return [Mixture(self.weights, each, self.widths) for each in means]


@dataclass(frozen=True)
class DiffusionChain:
    """The same chain with a diffusion head in place of its mixtures."""

    chain: MixtureChain
    steps: int = 10

    def densities(self, values: np.ndarray, first: int) -> Sequence[Density]:
        laws = self.chain.densities(values, first)
        return [Diffusion(law, self.steps) for law in laws if isinstance(law, Mixture)]

"""What a judge makes of k samples where everything is Gaussian: closed forms, to hold measurements against.

Demystifying LLM-as-a-Judge: Analytically Tractable Model for Inference-Time Scaling (2025). Samples are y ~ N(m, s^2),
the right answer is t, and a judge whose own target is r scores -(y - r)^2; the one chosen has probability
softmax(score / T), and T = 0 is best-of-k. The loss is the mean of (y - t)^2. Everywhere b = m - t is the bias of the
samples and c = r - t the judge's error. The formulas were derived for this model anew, not taken from the paper's code.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from decodery.core.noise import gumbel_argmax

_POINTS = 6000


def chosen(samples: np.ndarray, target: float, temperature: float, seed: int = 0) -> np.ndarray:
    """[n] of samples [n, k] those that a judge chooses: drawn by softmax, with the noise that tokens are drawn with."""
    scores = -((samples - target) ** 2)
    if temperature == 0:
        picked = scores.argmax(axis=1)
    else:
        rows = torch.from_numpy(scores / temperature)
        picked = gumbel_argmax(rows, seed, range(len(rows))).numpy()
    found: np.ndarray = np.take_along_axis(samples, picked[:, None], axis=1)[:, 0]
    return found


def one_sample(b: float, s: float) -> float:
    """The loss without a choice."""
    return b * b + s * s


def many_samples(b: float, c: float, s: float, temperature: float) -> float:
    """The loss as k grows without end, T > 0: what is chosen is Gaussian, nearer to the judge's target."""
    rho = 2 * s * s / temperature
    return ((b + rho * c) / (1 + rho)) ** 2 + s * s / (1 + rho)


def warm_judge(b: float, c: float, s: float, temperature: float, k: int) -> float:
    """The loss of k samples up to the first order in 1 / T. Where b (c - b) > s^2 / 2 the judge hurts from the second
    sample on."""
    return b * b + s * s - (1 - 1 / k) * (2 * s**4 + 4 * s * s * b * (b - c)) / temperature


def best_of_k(b: float, c: float, s: float, k: int) -> float:
    """The loss of the sample nearest to the judge's target, T = 0, by quadrature over its distance from that."""
    # The distance of the nearest of many samples spans orders of magnitude.
    u = np.exp(np.linspace(math.log(1e-9 * s), math.log(abs(c - b) + 12 * s), _POINTS))
    within = _normal((c - b + u) / s) - _normal((c - b - u) / s)
    beyond = np.exp((k - 1) * np.log1p(-np.minimum(within, 1 - 1e-15)))
    mass = _density((c + u - b) / s) * (c + u) ** 2 + _density((c - u - b) / s) * (c - u) ** 2
    return float(np.trapezoid(k * mass / s * beyond * u, np.log(u)))


def nearest_of_many(b: float, s: float, k: int) -> float:
    """`best_of_k` of a judge that knows the answer, for large k: the loss falls like 1 / k^2."""
    return math.pi * s * s * math.exp(b * b / (s * s)) / k**2


def averaged(spread: float, s: float, k: int) -> float:
    """`best_of_k` of a judge that knows, averaged over inputs whose biases are N(0, spread^2)."""
    biases = np.linspace(0, 9 * spread, 240)
    losses = np.array([best_of_k(b, 0.0, s, k) for b in biases])
    return float(2 * np.trapezoid(losses * _density(biases / spread) / spread, biases))


def averaged_of_many(spread: float, s: float, k: int) -> float:
    """`averaged` for large k; inf where tasks are so hard that it falls more slowly than 1 / k^2."""
    share = 1 - 2 * spread**2 / s**2
    return math.pi * s * s / math.sqrt(share) / k**2 if share > 0 else math.inf


def best_k(b: float, c: float, s: float, most: int = 4096) -> int:
    """Of 1, 2, 4, ... samples, up to `most`, how many have the least loss under a judge that errs by c."""
    widths = [1 << power for power in range(most.bit_length())]
    return min(widths, key=lambda k: best_of_k(b, c, s, k))


def ridge(features: int, points: int, noise: float, prior: float, weight: float) -> tuple[float, float, float]:
    """(squared bias, variance, posterior spread s^2) of Bayesian regression on isotropic inputs, for large sizes.

    noise: deviation of the labels; prior: of each weight; weight: the norm of the true ones.
    """
    ratio, penalty = features / points, noise**2 / (points * prior**2)
    # kappa solves kappa = penalty + kappa ratio / (1 + kappa), a quadratic with one positive root.
    half = (1 - penalty - ratio) / 2
    kappa = -half + math.sqrt(half * half + penalty)
    share = features / (1 + kappa) ** 2 / points
    bias = kappa**2 * weight**2 / (1 + kappa) ** 2 / (1 - share)
    spread = noise**2 / points * kappa / penalty * features / (1 + kappa)
    return bias, noise**2 * share / (1 - share), spread


def _normal(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = torch.special.ndtr(torch.from_numpy(x)).numpy()
    return found


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)

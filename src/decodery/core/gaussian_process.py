"""A Gaussian process over points of a cube, to say which untried point may be best."""

from __future__ import annotations

import numpy as np

_SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)


def matern(left: np.ndarray, right: np.ndarray, scale: float) -> np.ndarray:
    """[n, m] Matern covariances of smoothness 5/2 between points [n, d] and [m, d]."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2.0 * left @ right.T
    r = np.sqrt(5.0 * np.maximum(squares, 0.0)) / scale
    return (1.0 + r + r**2 / 3.0) * np.exp(-r)


class GaussianProcess:
    """What is expected of any point, given noisy values [n] of points [n, d].

    Values are standardised, so that `noise` is the variance of an observation in units of theirs; the length scale is
    the one of a few under which the values are most likely. Source: Gaussian Processes for Machine Learning (2006),
    2.2.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, noise: float = 1e-2) -> None:
        self.points = points
        self.mean, self.spread = float(values.mean()), float(values.std()) or 1.0
        standard = (values - self.mean) / self.spread
        fits = [self._fit(scale, standard, noise) for scale in _SCALES]
        _, self.scale, self._root, self._weights = max(fits, key=lambda fit: fit[0])

    def _fit(self, scale: float, values: np.ndarray, noise: float) -> tuple[float, float, np.ndarray, np.ndarray]:
        """Log-likelihood, up to a constant, with what predictions need."""
        covariance = matern(self.points, self.points, scale) + noise * np.eye(len(values))
        root = np.linalg.cholesky(covariance)
        weights = np.linalg.solve(root.T, np.linalg.solve(root, values))
        return -0.5 * float(values @ weights) - float(np.log(np.diag(root)).sum()), scale, root, weights

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean [m] and standard deviation [m] of the value at each of points [m, d]."""
        across = matern(points, self.points, self.scale)
        mean = across @ self._weights
        variance = 1.0 - (np.linalg.solve(self._root, across.T) ** 2).sum(axis=0)
        return self.mean + self.spread * mean, self.spread * np.sqrt(np.maximum(variance, 0.0))

    def upper(self, points: np.ndarray, kappa: float) -> np.ndarray:
        """[m] upper confidence bounds: mean plus `kappa` standard deviations."""
        mean, deviation = self.predict(points)
        return mean + kappa * deviation

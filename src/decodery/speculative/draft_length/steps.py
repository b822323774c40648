"""What steps really take: the measured cost of passes, corrected by what the latest steps took."""

from __future__ import annotations

import numpy as np

_FORGET = 0.99
_ALIKE = 0.3
"""A step that took longer or shorter than expected by a larger share was disturbed, and counts as if by this one."""
_SCALE, _NODE = (1.0, 2.0), (0.06, 20.0)
"""What is believed at first, and how many observations the belief is always worth: see `StepCosts`."""
_SMOOTH, _RECENT = 5.0, 50.0
"""Steps a factor of 1 is worth at first, and how many of the latest steps a factor is the mean of."""


class StepCosts:
    """Fits the time of a step as scale * (measured pass) + node * (drafted nodes).

    Recent steps count more. A curve that was measured once does not know how busy the machine is now, and passes are
    not all of a step: every drafted node has to be found, scored, weighed and remembered. `node` is in units of the
    pass without any. On top of the fit, every number of nodes has a factor of its own, for the steps in which the time
    of passes rises.
    """

    def __init__(self) -> None:
        self.scale, self.node = _SCALE[0], _NODE[0]
        # Of the least squares: sums of scale * scale, scale * node, node * node, scale * time and node * time.
        self._sums = [0.0] * 5
        # By number of nodes, as far as any step was allowed to go.
        self._factors, self._counts = np.ones(0), np.ones(0)

    def learn(self, costs: np.ndarray, nodes: int, seconds: float) -> None:
        """A step with `nodes` drafted nodes took `seconds`.

        Args:
            costs: [> nodes], the measured passes with 0, 1, ... .
        """
        self._reserve(len(costs))
        one = float(costs[0])
        curve, took = float(costs[nodes]) / one, seconds / one
        expected = self.scale * curve + self.node * nodes
        factor = self._factors[nodes]
        took = min(max(took, (1 - _ALIKE) * factor * expected), (1 + _ALIKE) * factor * expected)
        self._counts[nodes] = min(self._counts[nodes] + 1, _RECENT)
        self._factors[nodes] += (took / expected - factor) / self._counts[nodes]
        news = (curve * curve, curve * nodes, nodes * nodes, curve * took, nodes * took)
        self._sums = [_FORGET * old + new for old, new in zip(self._sums, news, strict=True)]
        cc, cn, nn, ct, nt = self._sums
        cc, ct = cc + _SCALE[1], ct + _SCALE[0] * _SCALE[1]
        nn, nt = nn + _NODE[1], nt + _NODE[0] * _NODE[1]
        width = cc * nn - cn * cn
        self.scale = max((ct * nn - nt * cn) / width, 1e-6)
        # Drafting never makes a step shorter.
        self.node = max((nt * cc - ct * cn) / width, 0.0)

    def corrected(self, costs: np.ndarray) -> np.ndarray:
        """[n] what steps with 0, 1, 2, ... drafted nodes take, given the measured passes [n] of each."""
        self._reserve(len(costs))
        fitted = self.scale * costs + self.node * float(costs[0]) * np.arange(len(costs))
        return fitted * self._factors[: len(costs)]

    def _reserve(self, sizes: int) -> None:
        new = sizes - len(self._factors)
        if new > 0:
            self._factors = np.concatenate((self._factors, np.ones(new)))
            self._counts = np.concatenate((self._counts, np.full(new, _SMOOTH)))

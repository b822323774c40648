"""How much more of the next but one token a hidden state tells than the token before it: what a drafting head can gain.

A Markov Categorical Framework for Language Modeling (2025). Let C be the context, H a function of it such as a hidden
state, W the next token and V the one after it. Then I(H; W V) = I(H; W) + I(H; V | W), and the second part, the
*surplus*, is what a drafter of V gains by reading H beside W. With J = I(C; V | W), the best drafter that reads W alone
is J away from the model in mean KL, and the best one that reads H too J - surplus. By Pinsker's and Jensen's
inequalities a draft drawn from a drafter that is d nats away is accepted with at least 1 - sqrt(d / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError


@dataclass(frozen=True)
class Surplus:
    """What a source lets drafters of the next but one token do, in nats and as chances of acceptance.

    whole: J; told: the surplus of the state. token, hidden: acceptance of the drafter nearest in mean KL that reads the
    token before, and of the one that reads the state too, which others may exceed; token_floor, hidden_floor: what
    the inequalities promise of them.
    """

    whole: float
    told: float
    token: float
    hidden: float

    @property
    def token_floor(self) -> float:
        return floor(self.whole)

    @property
    def hidden_floor(self) -> float:
        return floor(self.whole - self.told)

    @classmethod
    def of(cls, joint: np.ndarray, state: np.ndarray) -> Surplus:
        """Of a source. joint: [contexts, tokens, tokens] float64, P(c, w, v); state: [contexts] int, H of each context.

        Raises SettingsError for what is no distribution.
        """
        if joint.ndim != 3 or (joint < 0).any() or abs(joint.sum() - 1.0) > 1e-9:
            raise SettingsError("a source is a table of probabilities [contexts, tokens, tokens] that sum to 1")
        merged = np.zeros((int(state.max()) + 1, *joint.shape[1:]))
        np.add.at(merged, state, joint)
        law = _given(joint)
        token = np.minimum(law, _given(joint.sum(axis=0))).sum(axis=-1)
        hidden = np.minimum(law, _given(merged)[state]).sum(axis=-1)
        weights = joint.sum(axis=-1)
        return cls(
            conditional_information(joint),
            conditional_information(merged),
            float((weights * token).sum()),
            float((weights * hidden).sum()),
        )


def floor(away: float) -> float:
    """The least acceptance of drafts whose drafter is so many nats away in mean KL from the model."""
    return max(0.0, 1.0 - math.sqrt(max(away, 0.0) / 2.0))


def entropy(p: np.ndarray) -> float:
    """Of a distribution of any shape, in nats."""
    held = p[p > 0]
    return float(-(held * np.log(held)).sum())


def categorical_entropy(p: np.ndarray) -> float:
    """KL between a token [n] copied to two places and two tokens drawn apart: Shannon's entropy by another way."""
    copied, apart = np.diag(p), np.outer(p, p)
    held = copied > 0
    return float((copied[held] * np.log(copied[held] / apart[held])).sum())


def information(joint: np.ndarray) -> float:
    """I(A; B) of P(a, b) [a, b], in nats."""
    return entropy(joint.sum(axis=1)) + entropy(joint.sum(axis=0)) - entropy(joint)


def conditional_information(joint: np.ndarray) -> float:
    """I(A; C | B) of P(a, b, c) [a, b, c], in nats."""
    over = entropy(joint.sum(axis=2)) + entropy(joint.sum(axis=0))
    return over - entropy(joint) - entropy(joint.sum(axis=(0, 2)))


def stationary(transition: np.ndarray) -> np.ndarray:
    """[n, n] P(x, y) of neighbours in a chain of second order, transition [n, n, n] P(z | x, y), all of it above 0."""
    n = len(transition)
    step = np.zeros((n * n, n * n))
    for y in range(n):
        # (x, y) is followed by (y, z).
        step[np.arange(n)[:, None] * n + y, y * n + np.arange(n)] = transition[:, y]
    system = np.vstack([step.T - np.eye(n * n), np.ones(n * n)])
    found = np.linalg.lstsq(system, np.append(np.zeros(n * n), 1.0), rcond=None)[0]
    return found.reshape(n, n)


def of_chain(transition: np.ndarray) -> np.ndarray:
    """[n, n, n] P(x, w, v) of three tokens in a row of such a chain: the one before is all its context of V."""
    return stationary(transition)[..., None] * transition


def _given(joint: np.ndarray) -> np.ndarray:
    """P(v | the rest) of P(..., v); uniform where the rest never is."""
    total = joint.sum(axis=-1, keepdims=True)
    return np.where(total > 0, joint / np.where(total > 0, total, 1.0), 1.0 / joint.shape[-1])

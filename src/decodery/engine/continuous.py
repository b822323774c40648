"""Decoding models whose tokens are real vectors: the same four steps, with densities for probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.speculative.acceptance.continuous.density_ratio import Density, DensityRatio, draw


class ContinuousModel(Protocol):
    """A model that says, for every beginning of a sequence of values, how the next value is distributed."""

    def densities(self, values: np.ndarray, first: int) -> Sequence[Density]:
        """Of what follows values[:first], values[:first + 1], ..., values: n - first + 1 of them, in one pass.

        Args:
            values: [n, d].
        """
        ...


@dataclass(frozen=True)
class Continuous:
    """A finished sequence of continuous values.

    Attributes:
        values: [length, d].
        passes: Of the target.
        drafted, accepted: Values.
        exhausted: Residuals without a draw.
    """

    values: np.ndarray
    passes: int
    drafted: int
    accepted: int
    exhausted: int

    @property
    def values_per_pass(self) -> float:
        return len(self.values) / self.passes


def generate_values(
    target: ContinuousModel,
    length: int,
    size: int,
    *,
    drafter: ContinuousModel | None = None,
    gamma: int = 4,
    alone: float = 0.05,
    acceptance_rule: DensityRatio | str = "density-ratio",
    seed: int = 0,
) -> Continuous:
    """`length` values of R^size drawn from `target`, drafted `gamma` at a time by `drafter`.

    The seed decides the values, as it does for tokens: without a drafter the same ones for any rule.

    Args:
        alone: The share of the values that the target writes by itself before drafts begin.
    """
    chosen: DensityRatio = resolve("continuous-acceptance", acceptance_rule)
    if length < 1 or size < 1 or gamma < 1 or not 0 <= alone <= 1:
        raise SettingsError("continuous decoding needs length, size and gamma >= 1, and alone between 0 and 1")
    values = np.zeros((length, size))
    done = passes = drafted = accepted = exhausted = 0
    while done < length:
        # The value after the draft needs a place too.
        ahead = min(gamma, length - done - 1) if drafter is not None and done >= alone * length else 0
        laws: list[Density] = []
        for number in range(ahead):
            assert drafter is not None
            laws += drafter.densities(values[: done + number], done + number)
            values[done + number] = draw(laws[-1], seed, done + number)
        draft = values[done : done + ahead]
        emitted = chosen.choose(draft, target.densities(values[: done + ahead], done), laws, seed, done)
        values[done + emitted.accepted] = emitted.value
        done += emitted.accepted + 1
        passes, drafted, accepted = passes + 1, drafted + ahead, accepted + emitted.accepted
        exhausted += emitted.exhausted
    return Continuous(values, passes, drafted, accepted, exhausted)

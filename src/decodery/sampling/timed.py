"""Constraints with a clock, to measure the cost of masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from decodery.core.requirements import Requirements

from .constraint import Constrained, Constraint
from .sampler import Sampler


class Clock:
    """Seconds spent inside `with clock`; nested blocks count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._begin = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += perf_counter() - self._begin


class _Timed(Constraint):
    """A constraint whose methods are timed."""

    def __init__(self, constraint: Constraint, clock: Clock) -> None:
        self._constraint, self._clock = constraint, clock
        self.bonus, self.stops = constraint.bonus, constraint.stops

    @property
    def requirements(self) -> Requirements:
        return self._constraint.requirements

    def init(self, prompt: Sequence[int]) -> Any:
        with self._clock:
            return self._constraint.init(prompt)

    def allowed(self, state: Any) -> np.ndarray:
        with self._clock:
            return self._constraint.allowed(state)

    def bits(self, state: Any, vocab_size: int) -> np.ndarray:
        with self._clock:
            return self._constraint.bits(state, vocab_size)

    def advance(self, state: Any, token: int) -> Any:
        with self._clock:
            return self._constraint.advance(state, token)

    def is_complete(self, state: Any) -> bool:
        return self._constraint.is_complete(state)

    @property
    def asks(self) -> bool:
        return self._constraint.asks

    def question(self, state: Any) -> Callable[[], object] | None:
        return self._constraint.question(state)

    def idle(self, state: Any) -> bool:
        with self._clock:
            return self._constraint.idle(state)

    def permits(self, state: Any, token: int) -> bool:
        with self._clock:
            return self._constraint.permits(state, token)


def timed(sampler: Sampler, clock: Clock) -> Sampler:
    """The same sampler with a timed constraint.

    The clock covers what the constraint computes: states, masks and checks of drafted tokens. Kernels apply masks as a
    part of sampling, so that applying them counts for it, with any processors.
    """
    return Sampler(
        Constrained(_Timed(processor.constraint, clock)) if isinstance(processor, Constrained) else processor
        for processor in sampler.processors
    )

"""Texts that are read and not continued: what is wanted of them is numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from decodery.core.abstract import Contract
from decodery.engine.engine import Engine
from decodery.step.forward_request import ForwardCoroutine


@dataclass(eq=False)
class Reading(Contract):
    """A text that is read.

    Attributes:
        prompt: Its tokens.
        cache_namespace: Whose it is.
    """

    prompt: Sequence[int]
    cache_namespace: str = ""

    @abstractmethod
    def read(self, engine: Engine) -> ForwardCoroutine[list[float]]:
        """The numbers that are wanted of it."""

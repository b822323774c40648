"""Which search to use for a prompt of which difficulty, at which budget: a table that was fitted on a benchmark."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from decodery.core.errors import SettingsError
from decodery.models.loaders.fields import Kind, Listed, Number, Text, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect

_MOST = 1 << 12
"""The most strategies, budgets, bins and probes there may be."""


@dataclass(frozen=True, eq=False)
class Allocation(TrainedPart):
    """The strategies that were best, by the difficulty of a prompt and the budget.

    Attributes:
        scorer: Whose mean score of `probes` texts of a prompt tells how easy it is.
        edges: [bins - 1] rising; a mean of at least edges[i] and less than edges[i + 1] is in bin i + 1.
        budgets: Rising, in plain texts.
        strategies: Searches, as texts.
        choices: [bins][budgets] their numbers.
        model: `fingerprint` of the model they were tried with.
        facts: How it was made, and what came of it.
    """

    KIND = "table of strategies"
    MADE = "make one with `python benchmarks/train.py compute-optimal`"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "scorer": Text(),
        "probes": Whole(1, _MOST),
        "edges": Listed(Number(-1e30, 1e30), _MOST),
        "budgets": Listed(Whole(1, 1 << 30), _MOST),
        "strategies": Listed(Text(), _MOST),
    }

    scorer: str
    probes: int
    edges: tuple[float, ...]
    budgets: tuple[int, ...]
    strategies: tuple[str, ...]
    choices: tuple[tuple[int, ...], ...]
    model: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def bin(self, mean: float) -> int:
        """The bin, from the hardest on, of a prompt whose probes have this mean score."""
        return bisect_right(self.edges, mean)

    def strategy(self, mean: float, budget: int) -> str:
        """What to use at the largest known budget that is no larger than this one."""
        return self.strategies[self.choices[self.bin(mean)][self.place(budget)]]

    def place(self, budget: int) -> int:
        """The number of that budget.

        Raises:
            SettingsError: For less than the smallest.
        """
        if budget < self.budgets[0]:
            raise SettingsError(
                f"this table begins at a budget of {self.budgets[0]} texts, not {budget}: give at least that"
            )
        return bisect_right(self.budgets, budget) - 1

    def fits(self, model: Reader) -> None:
        """Raise SettingsError for another model than the one the strategies were tried with."""
        self.refuse_other(model)

    def artifact(self) -> Artifact:
        own = {name: getattr(self, name) for name in self.FACTS}
        choices = torch.tensor(self.choices, dtype=torch.int64, device="cpu")
        return Artifact(self.KIND, {"choices": choices}, {**self.facts, **own}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Allocation:
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value := found.facts[name], list) else value for name in cls.FACTS
        }
        choices = found.tensors["choices"]
        shape = (len(known["edges"]) + 1, len(known["budgets"]))
        expect(choices.dtype == torch.int64 and tuple(choices.shape) == shape and min(shape) > 0)
        expect(bool(((choices >= 0) & (choices < len(known["strategies"]))).all()))
        expect(rising(known["edges"]) and rising(known["budgets"]))
        facts = {name: value for name, value in found.facts.items() if name not in cls.FACTS}
        rows = tuple(tuple(row) for row in choices.tolist())
        return cls(**known, choices=rows, model=found.model, facts=facts)


def rising(values: Ordered[float]) -> bool:
    """Whether no number is smaller than the one before."""
    return list(values) == sorted(values)

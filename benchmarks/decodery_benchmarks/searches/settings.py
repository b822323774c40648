"""What a benchmark of searches is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from decodery.core.errors import SettingsError, UnknownMethod
from decodery.core.method_spec import parts
from decodery.core.registry import resolve
from decodery.search.base import Search
from decodery_benchmarks.puzzles import SPLITS, Puzzle, puzzle

from .rewards import reward

GREEDY = "greedy"
POOLED = ("pass@n", "best-of-n", "self-consistency", "weighted-vote", "first-finish")
"""What is computed from one pool of samples per puzzle, at every width, and not drawn again."""
SCORED = ("best-of-n", "weighted-vote")

_STEPS = "scorer={scorer},delimiter={delimiter}"
TOGETHER = {
    "bag-of-tricks": (
        *("best-of-n", "self-consistency", "weighted-vote"),
        f"dvts({_STEPS},n={{n}},m={{n}},rounds=20)",
        f"step-beam({_STEPS},n={{n}},m=2,rounds=8)",
        f"mcts({_STEPS},n=4,simulations={{n}},rounds=8)",
    ),
}
"""Names that stand for several methods. Bag of Tricks for Inference-time Computation of LLM Reasoning (2025) compares
these, `dvts` of one line being best-of-n step by step, and self-refine, which a model of puzzles cannot be asked for.
"""

Cell = tuple[str, str, int]
"""Method, reward ("" where none is asked) and budget."""


@dataclass(frozen=True)
class SearchSettings:
    """What is measured. puzzle: which, and how hard. methods: names of `TOGETHER`; names of `POOLED`, computed from
    `pool` samples of each puzzle; and searches by their specs, run again at each of `budgets`, which stand in place of
    {n}: {scorer} is the reward model, {delimiter} what ends a step, {pattern} what finds an answer, {length} the tokens
    of a solution. rewards: see `rewards.reward`. prompts: puzzles of `split`. temperature: of everything but greedy
    decoding.
    """

    model: str = "tiny-1M-chain"
    dtype: str = "auto"
    puzzle: str = "chain"
    methods: tuple[str, ...] = POOLED
    rewards: tuple[str, ...] = ("clean", "noisy", "hackable", "constant")
    budgets: tuple[int, ...] = (1, 2, 4, 8, 16)
    pool: int = 32
    prompts: int = 100
    split: str = "test"
    temperature: float = 1.0
    seed: int = 0
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        each = tuple(method for name in self.methods for method in TOGETHER.get(name, (name,)))
        object.__setattr__(self, "methods", tuple(dict.fromkeys(each)))
        if min(self.pool, self.prompts, *self.budgets, 1) < 1 or not self.budgets:
            raise SettingsError("a benchmark of searches needs budgets, pool and prompts of at least 1")
        if not math.isfinite(self.temperature) or self.temperature <= 0:
            raise SettingsError(f"samples that are all alike tell nothing: give a temperature above {self.temperature}")
        if not 0 <= self.seed < 1 << 64:
            raise SettingsError(f"seed must lie between 0 and 2^64 - 1, not {self.seed}")
        if self.split not in SPLITS:
            raise SettingsError(f"there is no split {self.split!r}: choose among {', '.join(SPLITS)}")
        if not self.methods or not self.rewards:
            raise SettingsError("name at least one method and one reward")
        if any(name in POOLED for name in self.methods) and max(self.budgets) > self.pool:
            raise SettingsError(f"{max(self.budgets)} samples need a pool of as many, not {self.pool}: give --pool")

    @property
    def asked(self) -> Puzzle:
        return puzzle(self.puzzle)

    def check(self) -> None:
        """Raise UnknownMethod or SettingsError for a method or a reward that is none."""
        for name in self.rewards:
            resolve("scorer", reward(name, self.asked))
        for name in self.methods:
            if name in POOLED:
                continue
            try:
                self.search(name, min(self.budgets), self.rewards[0])
            except UnknownMethod as error:
                raise UnknownMethod(f"{error}; computed from samples are {', '.join(POOLED)}") from error
            if parts(name)[0] in POOLED and name != parts(name)[0] and "{n}" not in name:
                raise SettingsError(f"{name} stays the same at every budget: write n={{n}} in it, or its name alone")

    def search(self, method: str, budget: int, scorer: str) -> Search:
        """The search that a method is at a budget with a reward."""
        found: Search = resolve("search", self.spec(method, budget, scorer))
        return found

    def spec(self, method: str, budget: int, scorer: str) -> str:
        """The same as a text, in which budget and reward stand in their places."""
        asked = self.asked
        places: Mapping[str, str] = {
            "{n}": str(budget),
            "{scorer}": reward(scorer, asked),
            "{delimiter}": asked.delimiter,
            "{pattern}": f'"{asked.pattern}"',
            "{length}": str(asked.length),
        }
        for place, value in places.items():
            method = method.replace(place, value)
        return method

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, raw: Any) -> SearchSettings:
        """The settings in a result file; raises SettingsError for what is none."""
        examples = {field.name: field.default for field in fields(cls)}
        if not isinstance(raw, dict) or set(raw) - set(examples):
            raise SettingsError("the result file has unknown settings: it was written by another version")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        for name, value in values.items():
            members = value if isinstance(value, tuple) else (value,)
            kind = int if name == "budgets" else str if isinstance(value, tuple) else type(examples[name])
            whole = kind is float and all(type(member) is int for member in members)
            if isinstance(value, tuple) is not isinstance(examples[name], tuple) or not (
                whole or all(type(member) is kind for member in members)
            ):
                raise SettingsError(f"the result file has the impossible setting {name} = {value!r}")
        return cls(**values)

"""What a benchmark of cache policies is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import methods as registered
from decodery.core.registry import resolve

UNIFORM, ORACLE = "uniform", "oracle"
BOUNDS = (UNIFORM, ORACLE)
"""What stands in every picture beside the policies."""
SUITED = {
    "snapkv": "snapkv:budget={},window=16",
    "dapq": "dapq:budget={},queries=16",
    "quest": "quest:budget={},page=8",
    "actqkv": "actqkv:budget={},block=8,window=64,sinks=4",
}
"""Windows and pages that suit some hundred tokens, where a policy is named alone."""
NUMBERS = ("quantized:bits=8,residual=32", "quantized:bits=4,residual=32")
"""What has no budget, but bits."""
WHOLE = 1.0


@dataclass(frozen=True)
class ContextSettings:
    """What is measured. methods: uniform, oracle, names of policies, or specs of them with {} for the budget; a spec
    without it is measured once. shares: budgets. prompts: lines of a list that are asked for; needles lie at six
    depths. input_tokens: lengths of the texts that needles lie in.
    """

    model: str = "smollm2"
    dtype: str = "auto"
    methods: tuple[str, ...] = ()
    shares: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    prompts: int = 10
    input_tokens: tuple[int, ...] = (300,)
    seed: int = 7

    def __post_init__(self) -> None:
        if not self.methods:
            object.__setattr__(self, "methods", default_methods())
        if not self.shares or any(not 0 < share <= 1 for share in self.shares):
            raise SettingsError(
                "budgets of cache policies are shares of a text, above 0 and up to 1: --shares 0.1,0.5,1"
            )
        if self.prompts < 1 or not self.input_tokens or min(self.input_tokens) < 50:
            raise SettingsError(
                "a benchmark of cache policies needs one prompt at least, and texts of 50 tokens or more"
            )
        for method in self.methods:
            if method not in BOUNDS:
                resolve("cache-policy", spec_of(method, self.shares[0]))

    @property
    def units(self) -> list[tuple[str, float]]:
        """Every method with every budget, in the order they are measured in."""
        found = [(method, share) for share in self.shares for method in self.methods if has_budget(method)]
        return found + [(method, WHOLE) for method in self.methods if not has_budget(method)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ContextSettings:
        """What `to_dict` gave. Raises CorruptFile for anything else."""
        try:
            known = {field.name: raw[field.name] for field in fields(cls)}
            lists = {name: tuple(known[name]) for name in ("methods", "shares", "input_tokens")}
            return cls(**known | lists)
        except (KeyError, TypeError, SettingsError) as error:
            raise CorruptFile(
                "the result file has no settings of a benchmark of cache policies: measure again"
            ) from error


def default_methods() -> tuple[str, ...]:
    """The lines to compare with, and every policy with a budget that needs no part made for a model first."""
    policies = [
        method for method in registered("cache-policy") if "budget" in {field.name for field in fields(method.cls)}
    ]
    common = set.intersection(*(set(method.requirements) for method in policies))
    return (*BOUNDS, *(method.name for method in policies if not set(method.requirements) - common), *NUMBERS)


def has_budget(method: str) -> bool:
    return method in BOUNDS or ":" not in method or "{}" in method


def spec_of(method: str, share: float) -> str:
    """The policy that a method is at a budget."""
    pattern = method if ":" in method else SUITED.get(method, f"{method}:budget={{}}")
    return pattern.replace("{}", f"{share:g}")

"""What a benchmark of monitors is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError

TESTBEDS = ("answers", "context", "talks", "heads", "feedback", "codes", "programs", "recall")


@dataclass(frozen=True)
class WatchSettings:
    """What is measured. methods: testbeds, see `TESTBEDS`. prompts: questions of `answers`, other testbeds have their
    share of it. rounds: seeds of split and training. rate: of what is harmless, flagged at most.
    """

    model: str = "smollm2"
    dtype: str = "auto"
    methods: tuple[str, ...] = TESTBEDS
    prompts: int = 960
    rounds: int = 5
    seed: int = 0
    rate: float = 0.1

    def __post_init__(self) -> None:
        if not self.methods or set(self.methods) - set(TESTBEDS):
            raise SettingsError(f"testbeds of monitors are {', '.join(TESTBEDS)}: name some with --methods")
        if self.prompts < 96 or self.rounds < 1:
            raise SettingsError("a benchmark of monitors needs at least 96 prompts and one round")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> WatchSettings:
        """What `to_dict` gave. Raises CorruptFile for anything else."""
        try:
            known = {field.name: raw[field.name] for field in fields(cls)}
            return cls(**known | {"methods": tuple(known["methods"])})
        except (KeyError, TypeError, SettingsError) as error:
            raise CorruptFile("the result file has no settings of a benchmark of monitors: measure again") from error

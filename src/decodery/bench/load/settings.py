"""What a measurement of load is made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError

from ..workloads import WORKLOADS

SHAREGPT = "sharegpt-like"
"""Questions and answers as long as those of ShareGPT's users; see `arrivals.sharegpt_like`."""


@dataclass(frozen=True)
class LoadSettings:
    """workload: where prompts come from, unless a trace names them. prompts: requests of a stage, None for 40 or all of
    a trace.

    concurrency: stages in which so many clients wait for one answer each; rates: stages with so many arrivals per
    second on average, by a Poisson process; with a trace, as many times its own speed. Without rates they are raised
    until the service breaks. first_token_limit, gap_limit: seconds to the first token and, on average, from one to the
    next, within which an answer is a good one. timeout: seconds after which a client leaves.
    """

    workload: str = "built-in"
    trace: str | None = None
    data: str | None = None
    prompts: int | None = None
    concurrency: tuple[int, ...] = (1, 16)
    rates: tuple[float, ...] = ()
    max_new_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    first_token_limit: float = 2.0
    gap_limit: float = 0.2
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.workload not in (SHAREGPT, *WORKLOADS):
            names = ", ".join((SHAREGPT, *WORKLOADS))
            raise SettingsError(f"there is no workload {self.workload!r}; choose among {names}")
        least = {"prompts": 1, "max_new_tokens": 1, "temperature": 0, "seed": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise SettingsError(f"--{name.replace('_', '-')} must be at least {bound}, not {value}")
        above = {name: (getattr(self, name),) for name in ("first_token_limit", "gap_limit", "timeout")}
        for name, values in {**above, "rates": self.rates, "concurrency": self.concurrency}.items():
            for value in values:
                if not 0 < value < float("inf"):
                    raise SettingsError(f"--{name.replace('_', '-')} must be above 0, not {value}")

    @property
    def folder(self) -> Path | None:
        return None if self.data is None else Path(self.data)

    def to_dict(self) -> dict[str, Any]:
        """As it comes back from JSON."""
        found = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LoadSettings:
        """The settings in a result file; raises CorruptFile where they are none."""
        try:
            lists: dict[str, Any] = {name: tuple(value) for name, value in raw.items() if isinstance(value, list)}
            return cls(**{**raw, **lists})
        except TypeError as error:
            raise CorruptFile(f"the result file has settings this version does not know: {error}") from error

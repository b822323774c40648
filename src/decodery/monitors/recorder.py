"""A monitor that keeps what a text shows, for others to learn from: what they learn from is what they will read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decodery.core.requirements import Requirements
from decodery.step.monitor import Monitor, Prompt, Row
from decodery.step.sequence import Sequence

from .probe import Pool
from .signature import Signature

__all__ = ["Recorder"]


@dataclass(frozen=True)
class Recorder(Monitor):
    """Keeps pooled prompt rows at every hook point, and each token's signature and rows.

    Attributes:
        k: log-probabilities of a signature. Its state: ({site: Pool}, ((numbers, {site: [width]}), ...)).
    """

    sites: tuple[str, ...] = ()
    k: int = 100

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=self.sites, prompt_taps=bool(self.sites))

    def start(self, seq: Sequence) -> Any:
        return {site: Pool() for site in self.sites}, ()

    def read(self, state: Any, rows: Prompt) -> Any:
        pools, seen = state
        return {site: pool.with_rows(rows.hidden[site]) for site, pool in pools.items()}, seen

    def observe(self, state: Any, row: Row) -> Any:
        pools, seen = state
        numbers = Signature.of(row.logits, row.token, self.k).numbers()
        return pools, (*seen, (numbers, {site: row.hidden[site].float().cpu() for site in self.sites}))

    def score(self, state: Any) -> float | None:
        return None

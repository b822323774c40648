"""What a request spent, in one object that the engine fills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import Any

from .errors import SettingsError


@dataclass(slots=True)
class Ledger:
    """What one request spent: a text, or a search with all of its branches, those that were left included.

    Attributes:
        tokens: Written, the first one and those of branches that were given up included.
        passes: In which the request took part, by model: a pass that several requests share counts once in each of
            them, so that passes do not add up over requests.
        rows: Fed to each model, of the request alone, so that rows add up.
        seconds: Of passes, by the request's share of their rows. A model's name is "model" for the engine's own, else
            what it was asked as, such as "draft". What is read again after a preemption counts as often as it is read.
        side_seconds: Of work beside the passes: scorers, tests of programs, patterns, grammars.
        side_limit: Of these at most.
        scorer_calls: Candidates judged by scorers.
        depth: Passes that had to follow each other, however many requests or models shared time with them.
        bytes: The most that the request's caches of all models held at a time; what branches share counts once, what
            two requests share in both.
        counts: What else was done, by name, such as "rejections" of a rule: it tells why, and is no further cost.
    """

    tokens: int = 0
    passes: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    scorer_calls: int = 0
    depth: int = 0
    bytes: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    side_seconds: float = 0.0
    side_limit: float = inf

    def require_time(self) -> None:
        """Raise SettingsError where nothing is left of the time for work beside the passes."""
        if self.side_seconds >= self.side_limit:
            raise SettingsError(
                f"scorers, tests, patterns and grammars of this request have taken {self.side_seconds:.1f} s, and may "
                f"take {self.side_limit:g}: ask for fewer texts, or for a faster scorer"
            )

    def spend(self, model: str, rows: int, seconds: float, *, first: bool) -> None:
        """Rows of one pass of a model.

        Args:
            first: They are the request's first in this pass.
        """
        self.passes[model] = self.passes.get(model, 0) + first
        self.rows[model] = self.rows.get(model, 0) + rows
        self.seconds[model] = self.seconds.get(model, 0.0) + seconds

    def add(self, earlier: Ledger) -> None:
        """Count what an earlier try of the same request spent as well."""
        for mine, theirs in ((self.passes, earlier.passes), (self.rows, earlier.rows)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0) + value
        for figures, others in ((self.seconds, earlier.seconds), (self.counts, earlier.counts)):
            for name, amount in others.items():
                figures[name] = figures.get(name, 0.0) + amount
        self.tokens += earlier.tokens
        self.scorer_calls += earlier.scorer_calls
        self.depth += earlier.depth
        self.side_seconds += earlier.side_seconds
        self.bytes = max(self.bytes, earlier.bytes)

    def summary(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "tokens": self.tokens,
            "passes": dict(self.passes),
            "rows": dict(self.rows),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "scorer_calls": self.scorer_calls,
            "depth": self.depth,
            "bytes": self.bytes,
            **({"side_seconds": round(self.side_seconds, 4)} if self.side_seconds else {}),
            **({"counts": {name: round(n, 4) for name, n in self.counts.items()}} if self.counts else {}),
        }


_charged: ContextVar[Ledger | None] = ContextVar("charged", default=None)


@contextmanager
def charging(ledger: Ledger) -> Iterator[None]:
    """What is counted inside is this request's."""
    token = _charged.set(ledger)
    try:
        yield
    finally:
        _charged.reset(token)


def charged() -> Ledger:
    """The ledger of the request in whose turn this is called; outside an engine one that is not used."""
    return _charged.get() or Ledger()


def count(name: str, amount: float = 1) -> None:
    """Note under `name` what the request in whose turn this is called did."""
    counts = charged().counts
    counts[name] = counts.get(name, 0) + amount

"""Where in a prompt the user speaks, and what a model's states hold of the conversation at the end of each turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from decodery.core.requirements import Requirements
from decodery.step.monitor import Monitor, Prompt, Row
from decodery.step.sequence import Sequence

from .probe import Pool

__all__ = ["TurnRecorder"]


def user_spans(seq: Sequence) -> list[tuple[int, int]]:
    """First and last prompt position, the last not included, of what the user says in each turn.

    What belongs to the chat template is in none. A prompt without one, or of unknown parts, is one turn, without its
    first token, which attention rests on whatever it is.
    """
    length, spans = seq.request.prompt_length, seq.request.user_spans
    return list(spans) if spans and spans[0][0] else [(min(1, length - 1), length)]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """A prompt that is read: what its rows are up to the end of each turn of the user's.

    Attributes:
        ends: Positions after the turns.
        pools: By hook point.
        at: How many tokens were read.
        found: {site: [2 * width]} of every turn that has ended, the mean of all rows up to there beside the last of
            them.
    """

    ends: tuple[int, ...]
    pools: Mapping[str, Pool]
    at: int = 0
    found: tuple[dict[str, torch.Tensor], ...] = ()

    @classmethod
    def of(cls, seq: Sequence, sites: Iterable[str]) -> Turns:
        return cls(tuple(end for _, end in user_spans(seq)), {site: Pool() for site in sites})

    def read(self, rows: Prompt) -> Turns:
        """The same after further rows; chunks of any size give the same."""
        pools, found, first = dict(self.pools), list(self.found), 0
        stop = self.at + len(rows.tokens)
        for end in [*(end for end in self.ends if self.at < end <= stop), stop]:
            upto = end - self.at
            if upto > first:
                pools = {site: pool.with_rows(rows.hidden[site][first:upto]) for site, pool in pools.items()}
            first = upto
            if len(found) < len(self.ends) and end == self.ends[len(found)]:
                found.append({site: pool.numbers() for site, pool in pools.items()})
        return replace(self, pools=pools, at=stop, found=tuple(found))


@dataclass(frozen=True)
class TurnRecorder(Monitor):
    """Keeps what `Turns` finds at these hook points, for others to learn from."""

    sites: tuple[str, ...] = ()

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=self.sites, prompt_taps=True)

    def start(self, seq: Sequence) -> Turns:
        return Turns.of(seq, self.sites)

    def read(self, state: Turns, rows: Prompt) -> Turns:
        return state.read(rows)

    def observe(self, state: Turns, row: Row) -> Turns:
        return state

    def score(self, state: Turns) -> float | None:
        return None

"""Diverse verifier tree search: several lines of steps apart from each other, each of which keeps its best step."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pool import require_count
from .step_nodes import Node, distinct
from .steps import Growth, StepSearch


@register(
    "dvts",
    paper="Scaling Test-Time Compute with Open Models (2024)",
    guarantee="lines do not compete; n=1, m=1 is plain decoding, and n=m the best of m at every step",
    requirements=("a scorer of beginnings and answers",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class DVTS(StepSearch):
    """Draws m continuations of each of n / m texts and goes on from the best of each.

    Of a line's last round all texts are returned that have ended. Of equal worth the continuation that was begun first
    is kept. The other settings are those of all searches over steps, see step-beam. Cost: n steps a round; memory: what
    the lines do not have in common.

    Attributes:
        n: Continuations in a round, a multiple of m.
        m: Continuations of each text in a round.
    """

    n: int = 16
    m: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("dvts", "n", self.n)
        require_count("dvts", "m", self.m)
        if self.n % self.m:
            raise SettingsError(f"dvts has n / m lines: give an n that m={self.m} divides, not {self.n}")

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        lines, ended = [growth.root] * (self.n // self.m), list[Node]()
        while lines:
            drawn = yield from growth.extend([line for line in lines for _ in range(self.m)])
            judged = set(map(id, (yield from growth.judge(drawn))))
            going = []
            for first in range(0, len(drawn), self.m):
                candidates = [node for node in drawn[first : first + self.m] if id(node) in judged]
                if not candidates:
                    continue
                best = max(candidates, key=self.worth)
                if best.finished:
                    ended += [node for node in distinct(candidates) if node.finished]
                else:
                    going.append(best)
            lines = going
        return (yield from growth.finish(ended))

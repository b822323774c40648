"""Chained arithmetic whose answer is named at once, as who does not reason would."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .base import MARK
from .chain import Chain, worked


@dataclass(frozen=True)
class DirectChain(Chain):
    """`chain` whose texts to learn from are the answer alone: `7+3*2-5%10=` asks for `#5`.

    A text is right by its answer, with steps or without. How hard a prompt is differs much: after a multiplication by
    nothing little is left to be computed.
    """

    @property
    def spec(self) -> str:
        return "direct-" + super().spec

    def solve(self, prompt: str, random: Random) -> str:
        return f"{MARK}{worked(prompt)[0][-1][3]}"

    def verify(self, prompt: str, text: str) -> bool:
        _, mark, answer = text.rpartition(MARK)
        return bool(mark) and answer == str(worked(prompt)[0][-1][3])

    def open(self, prompt: str, text: str) -> bool:
        """Until an answer is begun all is open: steps may be wrong and the answer right."""
        _, mark, answer = text.rpartition(MARK)
        return not mark or str(worked(prompt)[0][-1][3]).startswith(answer)

"""The exact value of a puzzle's texts: what a perfect reward model would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register
from decodery.scorers.text import texts
from decodery.step.scorer import Candidates, Scorer
from decodery_benchmarks.puzzles import Puzzle, puzzle

__all__ = ["PuzzleOracle"]


@register("puzzle-oracle", guarantee="exact: it knows the right answer", texts=("puzzle",))
@dataclass(frozen=True)
class PuzzleOracle(Scorer):
    """Scores 1 for a right solution or a beginning that can still lead to one, else 0.

    It is an upper bound, and what `corrupted` makes worse; a policy that is not ideal may fail where it says 1.

    Attributes:
        puzzle: Its name and settings, as in chain(operations=8), or the puzzle.
        graded: What is neither gets the share of its steps after which that still could be, and so is told from worse.
        blind: Whatever has not ended is worth a half, as for a verifier of outcomes, which sees no dead ends.
        decode: Ids to text, for who has no tokenizer.
    """

    puzzle: Puzzle | str
    graded: bool = False
    blind: bool = False
    decode: Callable[[Sequence[int]], str] | None = None

    bounds = 0.0, 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "puzzle", puzzle(self.puzzle))

    def score(self, candidates: Candidates) -> torch.Tensor:
        asked, decode = self.puzzle, self.decode or candidates.decode
        assert isinstance(asked, Puzzle)
        written = texts(candidates, decode, "puzzle-oracle")
        prompt = "" if decode is None else decode(candidates.prompt)
        found = [
            self._value(asked, prompt, text, finished)
            for text, finished in zip(written, candidates.finished, strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def _value(self, asked: Puzzle, prompt: str, text: str, finished: bool) -> float:
        if self.blind and not finished:
            return 0.5
        right = (asked.verify if finished else asked.open)(prompt, text)
        if right or not self.graded:
            return float(right)
        # The last step is what a text that is not right failed by, at the latest.
        labels = asked.labels(prompt, text)[:-1]
        return sum(labels) / (len(labels) + 1)

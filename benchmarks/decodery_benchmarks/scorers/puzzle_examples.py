"""What a puzzle's prompt alone tells of texts: the share of its examples that they pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register
from decodery.scorers.text import texts
from decodery.step.scorer import Candidates, Scorer
from decodery_benchmarks.puzzles import Puzzle, puzzle

__all__ = ["PuzzleExamples"]


@register("puzzle-examples", guarantee="1 for what passes all examples, which may still be wrong", texts=("puzzle",))
@dataclass(frozen=True)
class PuzzleExamples(Scorer):
    """The share of the examples in its prompt that a finished text passes, as unit tests would tell.

    Of puzzles that show none it is whether the text is right. What it remarks is the first example that fails.

    Attributes:
        puzzle: Its name and settings, as in prog(longest=4), or the puzzle.
        decode: Ids to text, for who has no tokenizer.
    """

    puzzle: Puzzle | str
    decode: Callable[[Sequence[int]], str] | None = None

    bounds = 0.0, 1.0
    prefixes = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "puzzle", puzzle(self.puzzle))

    def remark(self, prompt: str, text: str) -> str:
        """See `Scorer.remark`."""
        assert isinstance(self.puzzle, Puzzle)
        return self.puzzle.remark(prompt, text)

    def score(self, candidates: Candidates) -> torch.Tensor:
        asked, decode = self.puzzle, self.decode or candidates.decode
        assert isinstance(asked, Puzzle)
        written = texts(candidates, decode, "puzzle-examples")
        prompt = "" if decode is None else decode(candidates.prompt)
        return torch.tensor([asked.passed(prompt, text) for text in written], dtype=torch.float64, device="cpu")

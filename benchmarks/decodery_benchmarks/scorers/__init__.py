"""Reward models of known quality for puzzles. Importing them makes them known to specs such as `puzzle-oracle`."""

from .puzzle_examples import PuzzleExamples
from .puzzle_oracle import PuzzleOracle

__all__ = ["PuzzleExamples", "PuzzleOracle"]

"""Puzzles made by code and checked exactly: what searches are measured on, and small models are trained to solve."""

from __future__ import annotations

from .base import SPLITS, Puzzle, drawn
from .named import PUZZLES, puzzle

__all__ = ["PUZZLES", "SPLITS", "Puzzle", "drawn", "puzzle"]

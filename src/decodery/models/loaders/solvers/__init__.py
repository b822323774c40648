"""Small models that solve puzzles, sometimes: a folder each, with a README.md that says how it was made."""

from __future__ import annotations

from pathlib import Path

SHIPPED = {f"tiny-1M-{puzzle}": Path(__file__).with_name(puzzle) for puzzle in ("chain", "countdown")}
"""By name: the folder of a model that comes along."""

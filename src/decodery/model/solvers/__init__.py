"""Small models that solve puzzles, sometimes: a folder each, with a README.md that says how it was made."""

from __future__ import annotations

from pathlib import Path

SHIPPED = {"tiny-1M-chain": Path(__file__).with_name("chain")}
"""By name: the folder of a model that comes along."""

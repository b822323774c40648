"""Small models that solve puzzles, sometimes: a folder each, with a README.md that says how it was made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from decodery.llm.llm import LLM
from decodery.models.loaders import load as loading
from decodery.models.loaders.load import LoadedModel

SOLVERS = {f"tiny-1M-{puzzle}": Path(__file__).parents[1] / "solvers" / puzzle for puzzle in ("chain", "countdown")}
"""The folder of each, by its name in result files."""


def load_model(name: str, dtype: str = "auto") -> LoadedModel:
    """The solver of this name, or any other model that `decodery.load` finds."""
    loaded = loading.load(SOLVERS.get(name, name), dtype=dtype)
    return dataclasses.replace(loaded, name=name) if name in SOLVERS else loaded


def load(name: str, dtype: str = "auto") -> LLM:
    """The same as an `LLM`."""
    return LLM(load_model(name, dtype))

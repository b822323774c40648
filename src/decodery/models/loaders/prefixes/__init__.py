"""Learned prefixes that come with the package: a folder each, with a README.md that says how they were made."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from decodery.models.config import ModelConfig
from decodery.models.trained.prefix import Prefixes


def shipped_for(config: ModelConfig) -> Prefixes | None:
    """Those made for a model of this vocabulary and shape, or None."""
    found = _shipped()
    same = config.vocabulary == found.facts["vocabulary"]
    return found if same and all(prefix.fits(config) for prefix in found.by_name.values()) else None


@cache
def _shipped() -> Prefixes:
    return Prefixes.load(Path(__file__).with_name("smollm2"))

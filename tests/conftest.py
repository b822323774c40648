"""What all tests share: one thread budget, the evaluation data folder, the real model loaded once."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    # Before anything imports Triton: its kernels then run on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from covering import FULL, SEED
from turns import off_turn, recorded

HERE = Path(__file__).parent

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# Every process would parse all sources of the package for constants to draw, which takes longer than most tests.
providers._get_local_constants = lambda: providers._local_constants

# Tests run side by side, one process per core; tiny models gain nothing from threads of their own.
torch.set_num_threads(1)


REAL = {"smollm2", "smollm2_int8", "environment", "browser"}
"""Fixtures of the real model or a browser."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-all`: all below tests/integration, and what needs the real model.

    Such tests go first: they are the longest, and one process loads the model for most of them. Rows of tests take
    turns, unless all rows of matrices are wanted; those that run README's commands do not.
    """
    for item in items:
        if HERE / "integration" in item.path.parents or not REAL.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("integration")
    items.sort(key=lambda item: REAL.isdisjoint(getattr(item, "fixturenames", ())))
    if not FULL:
        always = {"invariant", "cuda"}
        rows = [
            item.nodeid
            for item in items
            if always.isdisjoint(mark.name for mark in item.iter_markers()) and "[README" not in item.name
        ]
        others = off_turn(rows, SEED, recorded())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FULL:
        terminalreporter.write_line(f"DECODERY_SEED={SEED} chose the rows that stand for matrices")


# What all modules hold is there to the end: the collector need not look through it, while it grows or again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of evaluation data, named by DECODERY_DATA."""
    folder = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no evaluation data: set DECODERY_DATA to a folder with spec_bench_dev.jsonl")
    return folder


@pytest.fixture
def own_methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods that a test makes known are forgotten after it, with the modules that it imported for them."""
    from decodery.core import registry

    registry.methods()
    known = {family: dict(each) for family, each in registry._registered.items()}
    modules = set(sys.modules)
    monkeypatch.setattr(registry, "_registered", known)
    yield
    for module in {method.cls.__module__ for each in known.values() for method in each.values()} - modules:
        sys.modules.pop(module, None)


@pytest.fixture
def pools_of_pytorch(monkeypatch):
    """Texts on the CPU keep their pages as on other devices."""
    from weakref import WeakValueDictionary

    from decodery.models.cache import page_pool

    monkeypatch.setattr(page_pool, "library", lambda: None)
    monkeypatch.setattr(page_pool, "_pools", WeakValueDictionary())


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model in float32, in which greedy texts are compared token by token."""
    import decodery

    return decodery.load("smollm2", dtype="float32")


@pytest.fixture(scope="session")
def smollm2_int8():
    """The embedded model with int8 weights."""
    import decodery

    return decodery.load("smollm2", dtype="int8")

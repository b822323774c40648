"""Python does not look for garbage while a command starts, and does so again afterwards, however that ends."""

from __future__ import annotations

import gc

import pytest

from decodery.cli.starting import starting


def test_garbage_is_looked_for_again_after_a_start() -> None:
    with starting():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no such model"), starting():
        raise ValueError("no such model")
    assert gc.isenabled()


def test_a_process_without_it_stays_without_it() -> None:
    gc.disable()
    try:
        with starting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

"""Speculative decoding: drafters, draft trees, acceptance rules and draft length policies."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from decodery.core.lazy_exports import submodule

    return submodule(__name__, name)

"""Uses of the engine beside plain text: compression of texts, simultaneous decoding, suggestions, puzzles."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from decodery.core.lazy_exports import submodule

    return submodule(__name__, name)

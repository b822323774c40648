"""What a server has to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLoad:
    """What a server has to do.

    Attributes:
        rows: Of the last pass.
        rows_read: Of all passes.
        tokens: Written in all.
        cache_bytes: Held, of cache_limit; the prefix figures: tokens of prompts looked up and found, and the bytes kept
            for that.
    """

    running: int
    waiting: int
    passes: int
    rows: int
    rows_read: int
    tokens: int
    cache_bytes: int
    cache_limit: int
    prefix_asked: int
    prefix_found: int
    prefix_bytes: int
    preemptions: int

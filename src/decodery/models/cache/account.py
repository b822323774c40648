"""What texts keep in memory: the one count that admission, ledgers and reports go by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from . import pages

if TYPE_CHECKING:
    from .cache import KVCache


def resident(caches: Iterable[KVCache]) -> int:
    """Bytes that these caches keep in memory together, with what their policies hold beside them.

    Pages, policies, sources, states and memory for states to come that they share count once.
    """
    every = list(caches)
    policies = {id(cache.policy): cache.policy for cache in every if cache.policy is not None}.values()
    beside = [table for policy in policies for table in policy.tables]
    return pages.resident((*(cache.pages for cache in every), *beside)) + resident_beside(every)


def resident_beside(caches: Iterable[KVCache], states: Mapping[int, int] | None = None) -> int:
    """Bytes that these caches and their policies keep outside of pages.

    Args:
        caches: The caches.
        states: Bytes of recurrent states that are kept without them, by their ids.
    """
    every = list(caches)
    policies = {id(cache.policy): cache.policy for cache in every if cache.policy is not None}.values()
    sources = {id(cache.memory): cache.memory.bytes for cache in every if cache.memory is not None}
    # Of most models there are none.
    own = {key: size for cache in every if cache.states.known for key, size in cache.states.held.items()}
    held = {**states, **own} if states else own
    spare = {id(memory): memory.bytes for cache in every if (memory := cache.states.memory) is not None}
    return sum(policy.bytes for policy in policies) + sum(held.values()) + sum(sources.values()) + sum(spare.values())

"""Stores of drafters that outlive one sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from copy import deepcopy
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from .sequence import Sequence

Scope = Literal["request", "problem", "process"]
"""Lifetime of a store: one text, all texts with the same prompt, or until `Memory.clear`."""
_Recent = OrderedDict[Hashable, dict[Hashable, Any]]


class Guarded:
    """A store that several texts may use at a time.

    Code that reads or writes it holds its lock; a copy has a lock of its own.
    """

    def __init__(self) -> None:
        self.lock = RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = object.__new__(type(self))
        with self.lock:
            vars(clone).update((name, deepcopy(value, memo)) for name, value in vars(self).items() if name != "lock")
        clone.lock = RLock()
        return clone


class Memory:
    """Stores that outlive a sequence, by scope.

    Several engines can share one. Texts of different cache namespaces share no store, so that drafts reveal nothing
    about other users' texts. Each store limits its own size. Process-wide stores are kept for the `namespaces` cache
    namespaces used last, and problem-wide ones for the `problems` prompts used last. Data from one text changes the
    drafts of later texts, never their tokens. Safe to share between threads.

    Args:
        problems: Number of prompts whose stores are kept.
        namespaces: Number of cache namespaces whose stores are kept.
    """

    def __init__(self, problems: int = 8, namespaces: int = 16) -> None:
        self.problems = problems
        self.namespaces = namespaces
        self._process: _Recent = OrderedDict()
        self._problem: _Recent = OrderedDict()
        self._lock = Lock()

    def recall(self, scope: Scope, seq: Sequence, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the store of this scope under `key`, or make it; a request always gets a new one.

        Args:
            scope: Lifetime of the store: a request, a prompt or the process.
            seq: The sequence that uses it.
            key: Identifies the store.
            make: Makes a new store.
        """
        if scope == "request":
            return make()
        with self._lock:
            if scope == "process":
                stores = _used(self._process, seq.request.cache_namespace, self.namespaces)
            else:
                stores = _used(
                    self._problem,
                    (seq.request.cache_namespace, *seq.tokens[: seq.request.prompt_length]),
                    self.problems,
                )
            if key not in stores:
                stores[key] = make()
            return stores[key]

    def shared(self) -> dict[int, Any]:
        """All stores by identity, with the parts of tuples; a copy of a state must not copy them."""
        with self._lock:
            held = [*self._process.values(), *self._problem.values()]
            stores = [store for each in held for store in each.values()]
        parts = [part for store in stores if isinstance(store, tuple) for part in store]
        return {id(each): each for each in (*stores, *parts)}

    def clear(self) -> None:
        """Drop all stores; sequences in progress keep the ones that they use."""
        with self._lock:
            self._process.clear()
            self._problem.clear()


def _used(known: _Recent, name: Hashable, most: int) -> dict[Hashable, Any]:
    """Return the stores under `name` and mark them as used last; of others, the `most` - 1 used last are kept."""
    stores = known.setdefault(name, {})
    known.move_to_end(name)
    while len(known) > most:
        known.popitem(last=False)
    return stores

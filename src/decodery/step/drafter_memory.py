"""What drafters remember beyond one sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from copy import deepcopy
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from .sequence import Sequence

Scope = Literal["request", "problem", "process"]
"""How long something is remembered: for one text, for all texts with the same prompt, or until `Memory.clear`."""
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

    The owner of several engines hands one to them.

    Texts of different cache namespaces share none, so that drafts tell nothing about other users' texts. Stores bound
    themselves; of the process-wide ones those of the `cache namespaces` used last are kept, of the problem-wide ones
    those of the `problems` prompts. What is learned from one text shapes the drafts of later ones, never their tokens.
    Safe to share between threads.

    Args:
        problems: Prompts whose stores are kept. cache namespaces: Cache namespaces whose stores are kept.
    """

    def __init__(self, problems: int = 8, namespaces: int = 16) -> None:
        self.problems = problems
        self.namespaces = namespaces
        self._process: _Recent = OrderedDict()
        self._problem: _Recent = OrderedDict()
        self._lock = Lock()

    def recall(self, scope: Scope, seq: Sequence, key: Hashable, make: Callable[[], Any]) -> Any:
        """The store of this scope under `key`, made where there is none; for a request always a new one.

        Args:
            scope: How long the store lives: for a request, a prompt or the process.
            seq: The sequence that asks.
            key: What tells one store from another.
            make: Makes a store.
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
        """By identity, all stores and the parts of tuples, which copies of a state must not copy."""
        with self._lock:
            held = [*self._process.values(), *self._problem.values()]
            stores = [store for each in held for store in each.values()]
        parts = [part for store in stores if isinstance(store, tuple) for part in store]
        return {id(each): each for each in (*stores, *parts)}

    def clear(self) -> None:
        """Forget everything; sequences in progress keep what they hold."""
        with self._lock:
            self._process.clear()
            self._problem.clear()


def _used(known: _Recent, name: Hashable, most: int) -> dict[Hashable, Any]:
    """The stores under `name`, from now on those used last; of others the `most` - 1 used last stay."""
    stores = known.setdefault(name, {})
    known.move_to_end(name)
    while len(known) > most:
        known.popitem(last=False)
    return stores

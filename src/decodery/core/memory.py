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


class Guarded:
    """A store that several texts may use at a time: who reads or writes it holds its lock; a copy has its own."""

    def __init__(self) -> None:
        self.lock = RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        with self.lock:
            vars(twin).update((name, deepcopy(value, memo)) for name, value in vars(self).items() if name != "lock")
        twin.lock = RLock()
        return twin


class Memory:
    """Stores that outlive a sequence, by scope. Whoever makes engines owns one and hands it to them.

    Stores bound themselves; of the problem-wide ones those of the `problems` prompts used last are kept. What is
    learned from one text shapes the drafts of later ones, never their tokens. Safe to share between threads.
    """

    def __init__(self, problems: int = 8) -> None:
        self.problems = problems
        self._process: dict[Hashable, Any] = {}
        self._problem: OrderedDict[tuple[int, ...], dict[Hashable, Any]] = OrderedDict()
        self._lock = Lock()

    def recall(self, scope: Scope, seq: Sequence, key: Hashable, make: Callable[[], Any]) -> Any:
        """The store of this scope under `key`, made where there is none; for a request always a new one."""
        if scope == "request":
            return make()
        with self._lock:
            stores = self._process if scope == "process" else self._of_problem(seq)
            if key not in stores:
                stores[key] = make()
            return stores[key]

    def shared(self) -> dict[int, Any]:
        """All stores, and the parts of those that are tuples, by identity: what a copy of a state must not copy."""
        with self._lock:
            stores = [*self._process.values(), *(store for each in self._problem.values() for store in each.values())]
        parts = [part for store in stores if isinstance(store, tuple) for part in store]
        return {id(each): each for each in (*stores, *parts)}

    def clear(self) -> None:
        """Forget everything; sequences in progress keep what they hold."""
        with self._lock:
            self._process.clear()
            self._problem.clear()

    def _of_problem(self, seq: Sequence) -> dict[Hashable, Any]:
        prompt = tuple(seq.tokens[: seq.prompt_length])
        stores = self._problem.setdefault(prompt, {})
        self._problem.move_to_end(prompt)
        while len(self._problem) > self.problems:
            self._problem.popitem(last=False)
        return stores

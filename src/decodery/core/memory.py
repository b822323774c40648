"""What drafters remember beyond one sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .sequence import Sequence

Scope = Literal["request", "problem", "process"]
"""How long something is remembered: for one text, for all texts with the same prompt, or until `Memory.clear`."""


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

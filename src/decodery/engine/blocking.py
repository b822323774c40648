"""Functions that may block, run on threads beside an engine's loop."""

from __future__ import annotations

from collections import Counter, deque
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import thread_time
from typing import Any
from weakref import WeakValueDictionary

import torch

from decodery.core.errors import SettingsError
from decodery.core.fair_slots import caller
from decodery.core.ledger import charging
from decodery.core.threads import one_thread
from decodery.step.forward_request import Blocking, Returned, result_of

from .task import SchedulerEntry

_EACH = 8
"""Functions of one owner that run at a time."""

_Call = tuple[SchedulerEntry, int, Blocking, Lock]


class BlockingCalls:
    """Runs blocking functions of tasks on daemon threads, and collects their results.

    Each owner has `_EACH` threads of its own, so that no owner's function waits for those of another. One that never
    ends keeps its thread, and holds up neither the engine nor the end of the process.
    """

    def __init__(self) -> None:
        self._results: SimpleQueue[tuple[SchedulerEntry, int, Blocking, Returned | Exception]] = SimpleQueue()
        self._locks: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._waiting: dict[str, deque[_Call]] = {}
        self._running = Counter[str]()
        self._changing = Lock()

    def begin(self, run: SchedulerEntry) -> None:
        """Start every blocking function that a task has just asked for, once its owner has a thread."""
        for number, (request, answer) in enumerate(zip(run.requests, run.results, strict=True)):
            if isinstance(request, Blocking) and answer is None:
                lock = self._locks.setdefault(id(request.shared), Lock()) if request.shared is not None else Lock()
                with self._changing:
                    self._waiting.setdefault(run.owner, deque()).append((run, number, request, lock))
        self._start(run.owner)

    def _start(self, owner: str) -> None:
        with self._changing:
            waiting = self._waiting.get(owner)
            while waiting and self._running[owner] < _EACH:
                call = waiting.popleft()
                if not _wanted(*call[:3]):
                    continue
                self._running[owner] += 1
                with charging(call[0].ledger):
                    context = copy_context()
                context.run(caller.set, owner)
                thread = Thread(target=context.run, args=(self._work, *call), name="blocking", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The process has no room for another one.
                    self._running[owner] -= 1
                    self._results.put((*call[:3], error))
            if not waiting:
                self._waiting.pop(owner, None)

    def _work(self, run: SchedulerEntry, number: int, call: Blocking, lock: Lock) -> None:
        # Gradients are each thread's own setting, and a loop computes none.
        begin = thread_time()
        try:
            run.ledger.require_time()
            with lock, torch.no_grad(), one_thread():
                result = result_of(call)
        except SettingsError as error:
            result = error
        except BaseException as error:
            # Such as SystemExit, which ends the text and not the engine.
            result = RuntimeError(f"{type(error).__name__}: {error}")
        with self._changing:
            run.ledger.side_seconds += thread_time() - begin
        self._results.put((run, number, call, result))
        with self._changing:
            self._running[run.owner] -= 1
            self._running += Counter()
        self._start(run.owner)

    def collect(self, seconds: float) -> list[SchedulerEntry]:
        """Tasks that got a result, once there is one; for so many seconds at most."""
        found: dict[int, SchedulerEntry] = {}
        try:
            while True:
                wait = seconds > 0 and not found
                run, number, call, result = self._results.get(wait, seconds if wait else None)
                if _wanted(run, number, call):
                    run.results[number] = result
                    found[id(run)] = run
        except Empty:
            return list(found.values())


def _wanted(run: SchedulerEntry, number: int, call: Blocking) -> bool:
    """Whether a task still waits for it; one that has left its turn since does not."""
    return number < len(run.requests) and run.requests[number] is call

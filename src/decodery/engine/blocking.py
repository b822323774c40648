"""Functions that may block, run on threads beside an engine's loop."""

from __future__ import annotations

from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any
from weakref import WeakValueDictionary

import torch

from decodery.core.ledger import charging
from decodery.core.threads import one_thread
from decodery.core.worker_pool import caller
from decodery.step.forward_request import Blocking, Returned, result_of

from .task import SchedulerEntry


class BlockingCalls:
    """Runs blocking functions of tasks, each on a daemon thread of its own, and collects their results.

    A thread for each, so that no task's function waits for those of others, and a function that never ends holds up
    neither the engine nor the end of the process.
    """

    def __init__(self) -> None:
        self._results: SimpleQueue[tuple[SchedulerEntry, int, Blocking, Returned | Exception]] = SimpleQueue()
        self._locks: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def begin(self, run: SchedulerEntry) -> None:
        """Start every blocking function that a task has just asked for."""
        for number, (request, answer) in enumerate(zip(run.requests, run.results, strict=True)):
            if isinstance(request, Blocking) and answer is None:
                with charging(run.ledger):
                    context = copy_context()
                context.run(caller.set, run.owner)
                lock = self._locks.setdefault(id(request.shared), Lock()) if request.shared is not None else Lock()
                call = (run, number, request, lock)
                Thread(target=context.run, args=(self._work, *call), name="blocking", daemon=True).start()

    def _work(self, run: SchedulerEntry, number: int, call: Blocking, lock: Any) -> None:
        # Gradients are each thread's own setting, and a loop computes none.
        try:
            with lock, torch.no_grad(), one_thread():
                result = result_of(call)
        except BaseException as error:
            # Such as SystemExit, which ends the text and not the engine.
            result = RuntimeError(f"{type(error).__name__}: {error}")
        self._results.put((run, number, call, result))

    def collect(self, seconds: float) -> list[SchedulerEntry]:
        """Tasks that got a result, once there is one; for so many seconds at most."""
        found: dict[int, SchedulerEntry] = {}
        try:
            while True:
                wait = seconds > 0 and not found
                run, number, call, result = self._results.get(wait, seconds if wait else None)
                # A task that has left its turn since wants nothing any more.
                if number < len(run.requests) and run.requests[number] is call:
                    run.results[number] = result
                    found[id(run)] = run
        except Empty:
            return list(found.values())

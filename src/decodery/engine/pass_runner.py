"""The passes of a step: who takes part, what they return, and what they cost."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from decodery.core.errors import OutOfMemory
from decodery.core.threads import one_thread
from decodery.core.trace import Step
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import ForwardRequest, answer

from .accounting import StepClock, aside, new_steps, spend
from .array_batch import ArrayBatch
from .blocking import BlockingCalls
from .schedule import Schedule
from .share import Place
from .task import CoroutineTask, SchedulerEntry

_SIDE_ROUNDS = 256
"""Passes of other models, one after another, that a pass of the target waits for at most."""


class PassRunner:
    """Runs the passes that tasks wait for, and lets the tasks go on with their results.

    Args:
        model: The engine's.
        blocking: Functions of tasks that run on other threads.
        running: The task that goes on at this moment, None between tasks.
        passes: Of the model so far.
        rows: Of its last one.
        attended: Sum of its rows' positions.
    """

    def __init__(self, model: LanguageModel, schedule: Schedule, blocking: BlockingCalls) -> None:
        self.running: SchedulerEntry | None = None
        self.passes = self.rows = self.attended = 0
        self._model, self._schedule, self._blocking = model, schedule, blocking

    def run_side(self, runs: list[SchedulerEntry], clock: StepClock) -> list[SchedulerEntry]:
        """Passes of other models, and of parts of the model itself, until none is waited for.

        Returns:
            Those who still do: searches whose owner has had its part of this step's rows, where others wait for the
            step.
        """
        owners = len({run.owner for run in runs})
        had, part = Counter[str](), max(self._schedule.limits.rows // max(owners, 1), 1)
        for _ in range(_SIDE_ROUNDS):
            waiting = [(run, numbers) for run in runs if (numbers := self._side(run))]
            asked = [
                (run, numbers)
                for run, numbers in waiting
                if len(runs) == 1 or not isinstance(run.task, CoroutineTask) or had[run.owner] < part
            ]
            if not asked:
                break
            places = self._schedule.budget.places(asked, side=True) or []
            for run, number in places:
                had[run.owner] += len(run.requests[number].segment) if isinstance(run.task, CoroutineTask) else 0
            self.run(places, clock, side=True)
        return [run for run, _ in waiting]

    def resume(self, run: SchedulerEntry) -> None:
        self.running = run
        try:
            # What is done between passes is small, whoever wrote it, and must not wake threads that then wait for more.
            with one_thread():
                run.resume()
        finally:
            self.running = None
        self._blocking.begin(run)

    def go_on(self, run: SchedulerEntry) -> None:
        """Let a task go on if it has all that it has asked for."""
        if not run.waits:
            self.resume(run)

    def run(
        self,
        places: list[Place],
        clock: StepClock,
        *,
        side: bool,
        joined: tuple[ArrayBatch, list[ForwardRequest]] | None = None,
    ) -> None:
        """Answer these asks, and let those go on who have all that they have asked for.

        Args:
            side: See `aside`.
            joined: Texts that take part all together, and their rows.
        """
        begin, texts = perf_counter(), len(places)
        segments = [run.requests[number].segment for run, number in places]
        if joined is None:
            found = answer([run.requests[number] for run, number in places])
        else:
            segments += [request.segment for request in joined[1]]
            found = answer([*(run.requests[number] for run, number in places), *joined[1]])
            own = found[len(places) :]
            del found[len(places) :]
            texts += len(joined[0])
        rows = sum(len(segment) for segment in segments)
        scored = perf_counter()
        if joined is not None:
            # Before others go on, who may change what these texts read.
            joined[0].choose(own, begin, rows, texts)
        shared = zip(places, segments, strict=False)
        works = sum(len(segment) for (run, _), segment in shared if isinstance(run.task, CoroutineTask))
        if not side:
            self.passes, self.rows = self.passes + 1, rows
        spend(places, found, self._model, (scored - begin) / max(rows, 1))
        for turn, ((run, number), each) in enumerate(zip(places, found, strict=True)):
            run.results[number] = each
            # Those who found no room in this pass come before those who were its last.
            run.served = self.passes + turn / len(places)
            if isinstance(each, OutOfMemory):
                # The frames it has passed hold all caches of the pass.
                each.__traceback__ = each.__context__ = each.__cause__ = None
        recorded: list[tuple[list[Step], float]] = []
        runs = list({id(run): run for run, _ in places}.values())
        for run in runs:
            if any(isinstance(each, OutOfMemory) for each in run.results) and self._schedule.starve(run):
                continue
            run.stalled = False
            if run.waits:
                run.earlier += 0.0 if side else scored - begin
                continue
            known = {id(trace): len(trace.steps) for trace in run.traces}
            self.resume(run)
            if steps := new_steps(run, known):
                recorded.append((steps, run.earlier))
                run.earlier = 0.0
        steps = [step for new, _ in recorded for step in new]
        clock.fill(steps, begin, scored, texts)
        for new, earlier in recorded:
            for step in new:
                step.score += earlier
        if side:
            return
        attended = self.attended = sum(int(segment.positions.sum()) for segment in segments)
        # Passes of a few rows take what reading the weights takes, and tell nothing about rows.
        if any(step.prefill for step in steps):
            self._schedule.pace.learn(rows, attended, clock.mark - begin)
        else:
            self._schedule.budget.learn(works, rows - works, attended, perf_counter() - begin)

    def _side(self, run: SchedulerEntry) -> list[int]:
        """The asks that wait for a pass of another model than the engine's own, or of a part of it that drafts."""
        return [number for number in run.unanswered if aside(run.requests[number], self._model)]

"""What a step took and cost: the time of its parts, and what others than the target read for it."""

from __future__ import annotations

from time import perf_counter

from ..core.trace import Step
from .task import Turn


class StepClock:
    """Where the time of a step goes; all that goes before the pass that a step is recorded in is proposing."""

    def __init__(self) -> None:
        self.mark = perf_counter()

    def fill(self, steps: list[Step], begin: float, scored: float, sequences: int) -> None:
        """Write the times of a pass into the steps that were recorded in it; `choose` holds each one's own so far."""
        if not steps:
            return
        ended, choose = perf_counter(), sum(step.choose for step in steps)
        for step in steps:
            step.propose, step.score, step.choose = begin - self.mark, scored - begin, choose
            step.commit, step.sequences = max(ended - scored - choose, 0.0), sequences
        self.mark = ended


def spend(run: Turn, number: int, seconds: float, shared: set[tuple[int, str]]) -> None:
    """Count what others than the target read. seconds: per row of the pass; shared: who takes part in it as what."""
    ask = run.asks[number]
    if not ask.role:
        return
    rows, first = len(ask.segment), (id(run), ask.role) not in shared
    shared.add((id(run), ask.role))
    for unit, amount in (("passes", int(first)), ("rows", rows), ("seconds", seconds * rows)):
        name = f"{ask.role} {unit}"
        run.spent[name] = run.spent.get(name, 0) + amount


def new_steps(run: Turn, known: dict[int, int]) -> list[Step]:
    """The steps recorded since, of which the last hears what others than the target have read."""
    steps = [step for trace in run.traces for step in trace.steps[known.get(id(trace), 0) :]]
    if steps and run.spent:
        for name, amount in run.spent.items():
            steps[-1].counts[name] = steps[-1].counts.get(name, 0) + amount
        run.spent = {}
    return steps

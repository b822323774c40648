"""What a step took and cost: the time of its parts, and what every request spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from decodery.core.trace import Step
from decodery.models.cache.account import resident
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import ForwardRequest, ForwardResult

from .task import SchedulerEntry

OWN = "model"
"""What an engine's own model goes by in ledgers."""


class StepClock:
    """Where the time of a step goes.

    All that goes before the pass that a step is recorded in is proposing.
    """

    def __init__(self) -> None:
        self.mark = perf_counter()

    def fill(self, steps: list[Step], begin: float, scored: float, sequences: int) -> None:
        """Write the times of a pass into the steps that were recorded in it.

        `choose` holds each one's own so far.
        """
        if not steps:
            return
        ended, choose = perf_counter(), sum(step.choose for step in steps)
        for step in steps:
            step.propose, step.score, step.choose = begin - self.mark, scored - begin, choose
            step.commit, step.sequences = max(ended - scored - choose, 0.0), sequences
        self.mark = ended


def aside(request: ForwardRequest, own: LanguageModel) -> bool:
    """Whether a request is for another model than the engine's, or for some of its layers in a role."""
    return request.model != own or bool(request.role and request.layer_plan != WHOLE)


def spend(
    places: Sequence[tuple[SchedulerEntry, int]],
    found: Sequence[ForwardResult | Exception],
    own: LanguageModel,
    seconds: float,
) -> None:
    """Enter a pass in the ledgers of those who took part.

    What went over several models or routes was one of each. Experts that a request's rows had to have read are counted,
    too, those of another model than the own one by its name.

    Args:
        places: Their asks, by number.
        found: What they were answered.
        own: The engine's model.
        seconds: Per row.
    """
    known: set[tuple[int, str, LanguageModel, LayerPlan]] = set()
    for (run, number), answered in zip(places, found, strict=True):
        request = run.requests[number]
        name = request.role if request.role and aside(request, own) else OWN
        rows, key = len(request.segment), (id(run.ledger), name, request.model, request.layer_plan)
        run.ledger.spend(name, rows, seconds * rows, first=key not in known)
        known.add(key)
        if isinstance(answered, ForwardResult) and answered.cost is not None and (read := answered.cost.experts):
            kind = "experts" if name == OWN else f"{name} experts"
            run.ledger.counts[kind] = run.ledger.counts.get(kind, 0) + read
        if request.segment.cache is not None:
            run.caches.add(request.segment.cache)
    for run in {id(run): run for run, _ in places}.values():
        # Before anything is kept or given up: a pass takes the most memory at its end.
        run.ledger.bytes = max(run.ledger.bytes, resident(run.caches))


def new_steps(run: SchedulerEntry, known: dict[int, int]) -> list[Step]:
    """The steps recorded since."""
    return [step for trace in run.traces for step in trace.steps[known.get(id(trace), 0) :]]

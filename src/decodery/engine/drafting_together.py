"""Drafters that propose for all texts of a step at once."""

from __future__ import annotations

from collections.abc import Hashable

from decodery.step.draft_length_policy import Budget
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .task import SchedulerEntry
from .text import reads


def prepare(begun: list[tuple[SchedulerEntry, Budget | None]]) -> list[tuple[Drafter, list[Sequence]]]:
    """Let every drafter that proposes jointly do so for its texts; returns both.

    An error ends all of its texts.
    """
    groups: dict[Hashable, list[tuple[Sequence, Budget]]] = {}
    for run, budget in begun:
        seq = run.task
        if isinstance(seq, Sequence) and budget is not None and (drafter := _drafter(seq)) is not None:
            groups.setdefault(drafter.together, []).append((seq, budget))
    found = []
    for group in groups.values():
        texts = [seq for seq, _ in group]
        drafter = texts[0].request.drafter
        try:
            if drafter is not None and drafter.prepare(group):
                found.append((drafter, texts))
        except Exception as error:
            for seq in texts:
                seq.fail(error)
    return found


def settle(groups: list[tuple[Drafter, list[Sequence]]]) -> None:
    """Let them learn of the step."""
    for drafter, texts in groups:
        try:
            drafter.settle(texts)
        except Exception as error:
            for seq in texts:
                seq.fail(error)


def _drafter(seq: Sequence) -> Drafter | None:
    """The drafter of a text that drafts in this step as much as it likes; None where it proposes for the text alone."""
    request = seq.request
    if request.drafter is None or request.draft_length is not None or request.drafter.together is None:
        return None
    if seq.remaining <= 1 or writes(request.model) or reads(seq) or asks(seq):
        return None
    return request.drafter


def asks(seq: Sequence) -> bool:
    """Whether a text's next draft needs more than arrays have; a drafter that breaks ends its own text."""
    drafter = seq.request.drafter
    try:
        return drafter is not None and drafter.asks(seq)
    except Exception as error:
        seq.fail(error)
        return True

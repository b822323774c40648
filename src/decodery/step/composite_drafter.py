"""Base class of drafters that combine other drafters."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader

from .drafter import Drafter, VerificationFeedback
from .sequence import Sequence
from .tree_drafter import TreeDrafter


@dataclass(frozen=True)
class Composite(Drafter):
    """A drafter that combines other drafters, each with a separate state.

    `start` of a subclass returns the state of the composite itself.
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[Drafter, ...]:
        """The combined drafters."""

    @cached_property
    def requirements(self) -> Requirements:
        return Requirements.merged(part.requirements for part in self.parts)

    def largest(self) -> int | None:
        sizes = [part.largest() for part in self.parts]
        return None if None in sizes else max(filter(None, sizes), default=0)

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return tuple(model for part in self.parts for model in part.auxiliary_models(target))

    def more_for(self, seq: Sequence, tokens: int) -> int:
        return sum(part.more_for(seq, tokens) for part in self.parts)

    def drops_models(self, seq: Sequence) -> bool:
        # Each drops its own.
        dropped = [part.drops_models(seq) for part in self.parts]
        return any(dropped)

    def held_rows(self, nodes: int) -> int:
        # Expanding a node takes its logits, copies of them in order and warped, and log-probabilities.
        grown = 4 * (nodes + 1)
        own = [part.held_rows(nodes) for part in self.parts]
        return sum(
            max(grown, rows) if isinstance(part, TreeDrafter) else rows
            for part, rows in zip(self.parts, own, strict=True)
        )

    def start(self, seq: Sequence) -> Any:
        for part in self.parts:
            seq.states[part] = part.start(seq)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        reading = seen.start < seq.request.prompt_length
        for part in self.parts:
            requirements = part.requirements
            if not reading or requirements.prompt or requirements.prompt_taps:
                part.observe(seq, seen if requirements.states else seen.of_tokens())

    def forget(self, seq: Sequence) -> None:
        for part in self.parts:
            part.forget(seq)

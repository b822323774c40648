"""Conditions for the end of a segment that need slow computations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from decodery.core.abstract import Contract

from .sequence import Sequence


class SegmentEnd(Contract):
    """A `segment_end` that needs a slow computation first, such as matching a pattern."""

    @property
    def asks(self) -> bool:
        """Whether `question` ever returns a computation."""
        return True

    @abstractmethod
    def question(self, seq: Sequence) -> Callable[[], object] | None:
        """The computation to run in a worker thread before this object is called; None for none.

        Args:
            seq: The text after its last token.
        """

    @abstractmethod
    def __call__(self, seq: Sequence) -> bool:
        """Whether the text is at the end of a segment; if `question` has not run, this waits for its result.

        Args:
            seq: The text after its last token.
        """

"""Ends of segments that hang on questions which may take long."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from decodery.core.abstract import Contract

if TYPE_CHECKING:
    from .sequence import Sequence


class SegmentEnd(Contract):
    """A `segment_end` that has to find something out first, such as whether a pattern matches."""

    @property
    def asks(self) -> bool:
        """Whether there ever is a question."""
        return True

    @abstractmethod
    def question(self, seq: Sequence) -> Callable[[], object] | None:
        """What to call beside the loop before this object is called; None where all is known.

        Args:
            seq: The text after its last token.
        """

    @abstractmethod
    def __call__(self, seq: Sequence) -> bool:
        """Whether the text has come to the end of a segment; without `question` it waits for the answer.

        Args:
            seq: The text after its last token.
        """

"""Models that write whole texts by themselves, such as those on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

from decodery.models.protocol import LanguageModel, Reader

if TYPE_CHECKING:
    from .forward_request import ForwardCoroutine
    from .sequence import Sequence


class Writer(LanguageModel, Protocol):
    """A model without `Capabilities.rows`: of another program, whose texts come as they are written."""

    def advance(self, seq: Sequence) -> ForwardCoroutine[None]:
        """Let a text grow by what has come of it, and end where it has ended.

        The first call begins it, and returns.

        A later one returns as soon as there is something of any text that this thread has begun. Whether a segment
        ends by what may take long, see `SegmentEnd`, is found out beside the loop.
        """
        ...


def writes(model: Reader) -> TypeGuard[Writer]:
    """Whether a model writes whole texts by itself and scores no rows."""
    return not model.capabilities.rows

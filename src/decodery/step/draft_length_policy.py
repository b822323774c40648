"""How much a step may draft, and what decides it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.requirements import Requirements

if TYPE_CHECKING:
    from decodery.models.protocol import Reader

    from .drafter import VerificationFeedback
    from .forward_request import ForwardCoroutine
    from .sequence import Sequence

__all__ = ["Budget", "DraftLengthPolicy", "Outlook"]

MOST_NODES = 80
"""Drafted tokens per text and step, unless a request allows another number: as many as the largest published tree that
is a method's default."""
LARGEST = 1024
"""What a request may allow at most: what a draft takes grows with the square of its nodes."""


class Outlook:
    """What is known right before a draw of a drafter that draws token by token.

    Args:
        drawn: Tokens drawn in this step so far.
        hidden: [hidden], the draft model's last layer after the last token it has read, which is the one before the
            newest; None where nothing of this step has been read.
        law: [vocab], the unnormalised log-probabilities of the next draw; asking for them lets the draft model read the
            newest token.
    """

    def __init__(
        self, drawn: int, hidden: torch.Tensor | None, law: Callable[[], ForwardCoroutine[torch.Tensor]]
    ) -> None:
        self.drawn = drawn
        self.hidden = hidden
        self._ask = law
        self._law: torch.Tensor | None = None

    def law(self) -> ForwardCoroutine[torch.Tensor]:
        """[vocab]; see above."""
        if self._law is None:
            self._law = yield from self._ask()
        return self._law


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds for one step's draft: `nodes` drafted tokens, none further than `depth` from the root.

    Attributes:
        nodes: Most drafted tokens.
        depth: Greatest distance of a drafted token from the root.
        sequences: How many share the pass.
        pass_seconds: Gives, by the tokens in the cache, the times of passes over 0, 1, 2, ... rows on this machine,
            [rows] float64, where they are known.
        ask: See `goes_on`.
        measured: Whether the times are learned from the steps themselves, or given and final.
        plain_known: Whether steps of so many texts without drafts were seen lately; only then it is known what drafts
            save.
        context: Tokens in the cache of this text.
    """

    nodes: int
    depth: int
    sequences: int = 1
    pass_seconds: Callable[[int], np.ndarray] | None = None
    ask: Callable[[Outlook], bool | ForwardCoroutine[bool]] | None = None
    measured: bool = False
    context: int = 0
    plain_known: bool = True

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """Times [k] float64 of passes over `rows` [k] rows after this text; 1 where unknown."""
        return np.ones(len(rows)) if self.pass_seconds is None else at_rows(self.pass_seconds(self.context), rows)

    def drafted(self, nodes: int) -> np.ndarray:
        """Times [nodes + 1] float64 of this step with 0, 1, 2, ... drafted rows of all its texts together."""
        return self.seconds(self.sequences + np.arange(nodes + 1))

    def batch_seconds(self, rows: np.ndarray, contexts: Ordered[int]) -> np.ndarray:
        """Times of passes that n texts share: [k] float64, all 1 where they are not known.

        Linear layers see all rows of a pass together; what a text's own context costs, it costs that text's rows alone.

        Args:
            rows: [n, k] int, of each text in each pass.
            contexts: n numbers of tokens in the texts' caches.
        """
        if self.pass_seconds is None:
            return np.ones(rows.shape[1])
        bare = self.pass_seconds(0)
        seconds = at_rows(bare, rows.sum(axis=0))
        for own, context in zip(rows, contexts, strict=True):
            seconds = seconds + at_rows(self.pass_seconds(context) - bare, own)
        return seconds

    def goes_on(self, outlook: Outlook) -> bool | ForwardCoroutine[bool]:
        """Whether to draw one more token.

        Drafters that `ask` call it once before every draw, the first included. The answer depends on what has been
        drawn, never on the token about to be, and what has been drawn stays in the draft: otherwise rules that test
        draws would be biased.
        """
        return self.ask is None or self.ask(outlook)


def at_rows(known: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Times of `rows` [k], where `known` has those of 0, 1, 2, ...; its last step goes on beyond."""
    last = len(known) - 1
    beyond = np.maximum(rows - last, 0) * (known[last] - known[last - 1] if last else 0.0)
    return known[np.minimum(rows, last)] + beyond


@dataclass(frozen=True)
class DraftLengthPolicy:
    """Decides how much every step drafts.

    Fields are settings; memory lives in `seq.budget_state`.

    Bounds are upper ones: a drafter's own settings bound its drafts as well. One that stops drafters between their
    draws says `requirements = Requirements(pauses=True)`.
    """

    @property
    def requirements(self) -> Requirements:
        """What it must find: `pauses`, `draft_states` or `costs`."""
        return Requirements()

    def fits(self, model: Reader) -> None:
        """Raise SettingsError where this is not for drafts of the draft model `model`."""

    def largest(self) -> int | None:
        """How many nodes it lets a step draft at most, by its settings; None where they set no bound."""
        return None

    def start(self, seq: Sequence) -> Any:
        """Memory for a new sequence whose prompt is `seq.tokens`; becomes `seq.budget_state`."""
        return None

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        """The bounds of this step's draft, within `limit`; 0 nodes where plain decoding is better.

        Args:
            seq: The sequence whose draft is bounded.
            limit: The bounds that hold in any case.
            batch: All sequences in progress, this one among them.
        """
        return limit

    def goes_on(self, seq: Sequence, outlook: Outlook) -> bool | ForwardCoroutine[bool]:
        """See `Budget.goes_on`; asked only of policies that need `pauses`."""
        return True

    def observe(self, seq: Sequence, seen: VerificationFeedback, seconds: float) -> None:
        """Learn from a step: its tree, what of it was accepted, and how long drafting it took.

        Args:
            seq: The sequence after the step.
            seen: What the pass gave.
            seconds: Time that drafting took.
        """

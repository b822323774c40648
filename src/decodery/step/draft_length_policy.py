"""Draft length policies and budgets, which bound how much a step drafts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader

from .drafter import VerificationFeedback
from .forward_request import ForwardCoroutine

if TYPE_CHECKING:
    from .sequence import Sequence

__all__ = ["Budget", "DraftLengthPolicy", "Outlook"]

MOST_NODES = 80
"""Drafted tokens per text and step, unless a request allows another number: as many as the largest published tree that
is a method's default."""
LARGEST = 1024
"""Maximum that a request may set: the cost of a draft grows with the square of its nodes."""


class Outlook:
    """The state before a draw of a drafter that draws token by token.

    Args:
        drawn: Tokens drawn in this step so far.
        hidden: [hidden], the draft model's last layer after the last token that it has read, the one before the newest;
            None where it has read no token of this step.
        law: [vocab], the unnormalised log-probabilities of the next draw; to compute them, the draft model reads the
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
        nodes: Maximum number of drafted tokens.
        depth: Maximum distance of a drafted token from the root.
        sequences: Number of texts that share the pass.
        pass_seconds: Returns the times of passes over 0, 1, 2, ... rows on this machine, [rows] float64, for a number
            of tokens in the cache; None where they are unknown.
        ask: See `goes_on`.
        measured: Whether the times are learned from the steps themselves; False where they are given and final.
        plain_known: Whether steps of this many texts without drafts were measured recently; without them, the time that
            drafts save is unknown.
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
        """Times [k] float64 of passes over `rows` [k] rows after this text; 1 where they are unknown."""
        return np.ones(len(rows)) if self.pass_seconds is None else at_rows(self.pass_seconds(self.context), rows)

    def drafted(self, nodes: int) -> np.ndarray:
        """Times [nodes + 1] float64 of this step with 0, 1, 2, ... drafted rows of all its texts together."""
        return self.seconds(self.sequences + np.arange(nodes + 1))

    def batch_seconds(self, rows: np.ndarray, contexts: Ordered[int]) -> np.ndarray:
        """Times of passes that n texts share: [k] float64, all 1 where they are unknown.

        Linear layers process all rows of a pass together; the cost of a text's context applies only to its own rows.

        Args:
            rows: [n, k] int, number of rows of each text in each pass.
            contexts: [n] number of tokens in the cache of each text.
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

        Drafters call it once before every draw, the first included, where `ask` is set. The result may depend on
        earlier draws but not on the next one, and drawn tokens stay in the draft. Otherwise acceptance rules that test
        draws would be biased.
        """
        return self.ask is None or self.ask(outlook)


def at_rows(known: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Times of `rows` [k], where `known` has those of 0, 1, 2, ...; larger ones are extrapolated linearly."""
    last = len(known) - 1
    beyond = np.maximum(rows - last, 0) * (known[last] - known[last - 1] if last else 0.0)
    return known[np.minimum(rows, last)] + beyond


@dataclass(frozen=True)
class DraftLengthPolicy:
    """Decides how much every step drafts.

    Fields are settings; the state of a text is in `seq.budget_state`.

    Its bounds are upper bounds; a drafter's own settings bound its drafts too. A policy that stops drafters between
    their draws declares `requirements = Requirements(pauses=True)`.
    """

    @property
    def requirements(self) -> Requirements:
        """Its requirements: `pauses`, `draft_states` or `costs`."""
        return Requirements()

    def fits(self, model: Reader) -> None:
        """Raise SettingsError if it does not work with the draft model `model`."""

    def largest(self) -> int | None:
        """Maximum number of nodes per step, by its settings; None where they set no bound."""
        return None

    def start(self, seq: Sequence) -> Any:
        """Make the state of a new sequence with the prompt `seq.tokens`; it becomes `seq.budget_state`."""
        return None

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        """The bounds of this step's draft, within `limit`; 0 nodes where plain decoding is better.

        Args:
            seq: The sequence whose draft is bounded.
            limit: The upper bounds.
            batch: All sequences in progress, including this one.
        """
        return limit

    def goes_on(self, seq: Sequence, outlook: Outlook) -> bool | ForwardCoroutine[bool]:
        """See `Budget.goes_on`; called only for policies that require `pauses`."""
        return True

    def observe(self, seq: Sequence, seen: VerificationFeedback, seconds: float) -> None:
        """Update the state after a step.

        Args:
            seq: The sequence after the step.
            seen: The scored tree and its accepted nodes.
            seconds: Time that drafting took.
        """

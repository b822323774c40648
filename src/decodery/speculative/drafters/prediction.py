"""A predicted answer as the draft: what somebody expects the text to be, followed as far as it comes true."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register, resolve
from decodery.core.requirements import Provides
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Composite, Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

from ..stores.ngrams import Occurrences

_OWN = 1
"""Where the state keeps where the text stands in the prediction; before it stands the other drafter's."""
_ORDERS = (8, 5, 3)


@register("prediction", lossless=True)
@dataclass(frozen=True)
class Prediction(Composite):
    """Drafts an answer that is known in advance but for a few changes, as of a file that is edited.

    What was drafted of the prediction, and what of that came true, is counted in the ledger: "predicted", "predicted
    rightly". Scope: the request, and that of the other drafter; memory: one entry per order and token. Source: OpenAI's
    Predicted Outputs.

    Attributes:
        tokens: The predicted answer. Where the text leaves it, the drafter goes on after the last tokens that occur in
            the prediction again, and until there are some another drafter speaks.
        length: Tokens drafted at a time.
        drafter: What drafts where the text has left the prediction, an instance or a text.
    """

    tokens: tuple[int, ...]
    length: int = 16
    drafter: Drafter | str = "auto"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SettingsError(f"prediction needs length >= 1, not {self.length}")
        object.__setattr__(self, "drafter", resolve("drafter", self.drafter))

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.drafter,)  # type: ignore[return-value]  # resolved above

    @property
    def provides(self) -> Provides:
        return Provides.merged((self.parts[0].provides, Provides(drafts=("deterministic",))))

    def largest(self) -> int | None:
        other = super().largest()
        return None if other is None else max(other, self.length)

    def start(self, seq: Sequence) -> list[Any]:
        return [*super().start(seq), _Place(self.tokens)]

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        place: _Place = seq.draft_state[_OWN]
        expected = place.expected(seq.generated, min(self.length, budget.nodes, budget.depth))
        place.drafted = len(expected)
        if expected:
            ends = (number for number, token in enumerate(expected, start=1) if token in seq.eos_ids)
            return DraftTree.chain(seq.pending, expected[: next(ends, None)])
        with self.part(seq, 0) as drafter:
            return (yield from as_coroutine(drafter.propose(seq, budget)))

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        place: _Place = seq.draft_state[_OWN]
        if place.drafted:
            count("predicted", len(seen.tree) - 1)
            count("predicted rightly", len(seen.path))
            place.drafted = 0
        super().observe(seq, seen)


@dataclass(slots=True)
class _Place:
    """Where a text stands in its prediction.

    Attributes:
        at: The token expected next, None where the text has left the prediction.
        read: How many of the text's tokens are known.
        drafted: How many tokens of the step in progress are predicted ones.
    """

    tokens: tuple[int, ...]
    at: int | None = 0
    read: int = 0
    drafted: int = 0
    occurrences: Occurrences = field(default_factory=lambda: Occurrences(_ORDERS))

    def expected(self, text: list[int], most: int) -> list[int]:
        """At most `most` tokens that the prediction has after `text`."""
        for token in text[self.read :]:
            held = self.at is not None and self.at < len(self.tokens) and self.tokens[self.at] == token
            self.at = self.at + 1 if self.at is not None and held else None
        self.read = len(text)
        if self.at is None:
            self.occurrences.extend(list(self.tokens))
            found = self.occurrences.find(text)
            self.at = None if found is None else found[0]
        return [] if self.at is None else list(self.tokens[self.at : self.at + most])

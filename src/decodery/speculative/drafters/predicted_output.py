"""A predicted output as the draft: a text that is expected, followed as far as the model writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register, resolve
from decodery.core.requirements import Provides
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

from ..stores.ngrams import Occurrences

_ORDERS = (8, 5, 3)


@register("predicted-output", lossless=True, requirements=("the setting predicted_output",))
@dataclass(frozen=True)
class PredictedOutput(Composite):
    """Drafts an answer that is known in advance but for a few changes, as of a file that is edited.

    The request's setting `predicted_output` gives the text. Where the output leaves it, the drafter continues after the
    last tokens that occur in the predicted output again; until there are some, another drafter drafts. The ledger
    counts the drafted tokens ("predicted") and the accepted ones ("predicted rightly"). Scope: the request, and that of
    the other drafter; memory: one entry per order and token.

    Attributes:
        tokens: The predicted output, as `predicted_output` sets it.
        length: Tokens drafted per step.
        drafter: The other drafter.

    References:
        OpenAI's Predicted Outputs.
    """

    tokens: tuple[int, ...] = ()
    length: int = 16
    drafter: Drafter | str = "auto"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SettingsError(f"predicted-output needs length >= 1, not {self.length}")
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

    def start(self, seq: Sequence) -> _Place:
        if not self.tokens:
            raise SettingsError("predicted-output has no text to draft: give predicted_output=TEXT")
        super().start(seq)
        return _Place(self.tokens)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        place: _Place = seq.states[self]
        expected = place.expected(seq.generated, min(self.length, budget.nodes, budget.depth))
        place.drafted = len(expected)
        if expected:
            ends = (number for number, token in enumerate(expected, start=1) if token in seq.request.eos_ids)
            return DraftTree.chain(seq.last_token, expected[: next(ends, None)])
        return (yield from as_coroutine(self.parts[0].propose(seq, budget)))

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        place: _Place = seq.states[self]
        if place.drafted:
            count("predicted", len(seen.tree) - 1)
            count("predicted rightly", len(seen.path))
            place.drafted = 0
        super().observe(seq, seen)


@dataclass(slots=True)
class _Place:
    """The position of a text in its predicted output.

    at: the token expected next, None where the text has left it; read: how many of the text's tokens are known;
    drafted: how many tokens of the predicted output the step in progress has.
    """

    tokens: tuple[int, ...]
    at: int | None = 0
    read: int = 0
    drafted: int = 0
    occurrences: Occurrences = field(default_factory=lambda: Occurrences(_ORDERS))

    def expected(self, text: list[int], most: int) -> list[int]:
        """At most `most` tokens that the predicted output has after `text`."""
        for token in text[self.read :]:
            held = self.at is not None and self.at < len(self.tokens) and self.tokens[self.at] == token
            self.at = self.at + 1 if self.at is not None and held else None
        self.read = len(text)
        if self.at is None:
            self.occurrences.extend(list(self.tokens))
            found = self.occurrences.find(text)
            self.at = None if found is None else found[0]
        return [] if self.at is None else list(self.tokens[self.at : self.at + most])

"""What a monitor is: it reads a text while it is written, says how suspicious it is, and may act on that."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from decodery.core.abstract import Contract
from decodery.core.requirements import Requirements
from decodery.models.hooks import Intervention, Tap

if TYPE_CHECKING:
    from decodery.models.protocol import Reader

    from .sequence import Sequence

__all__ = ["Monitor", "Prompt", "Regenerate", "Rollback", "Row", "Stop"]

WHOLE = 1 << 40
"""`Monitor.rolls` of one that takes back whole texts: more tokens than any has."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A committed token and the row of the pass that it was chosen at.

    Attributes:
        token: Its id.
        position: Its place in the output, 0 for the first.
        final: Whether the text ends after it.
        logits: [vocab] of that row, the model's own.
        hidden: {tap: [width]} of that row: what the model made of all that stands before the token.
    """

    token: int
    position: int
    final: bool
    logits: torch.Tensor
    hidden: dict[Tap, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Rows of the prompt as it is read, in chunks from the first on.

    Attributes:
        tokens: Their ids.
        hidden: {tap: [n, width]}.
        last: Whether the prompt ends here.
    """

    tokens: list[int]
    hidden: dict[Tap, torch.Tensor]
    last: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End the text after the token that was seen; it finishes with "content_filter"."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """Take back the last `tokens` tokens.

    Attributes:
        tokens: How many of the last tokens are taken back.
        ban: What is not written at the first of these places.
        write: What the text goes on with there.
    """

    tokens: int
    ban: tuple[int, ...] = ()
    write: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Take back the whole text and write it anew with another seed, a few times at most.

    What is written after that stays.
    """


Action = Stop | Rollback | Regenerate


@dataclass(slots=True)
class MonitorReport:
    """What a monitor found of a text.

    Attributes:
        name: The monitor's.
        limit: Scores above it are flagged.
        scores: After every output token, None where nothing was known yet.
        flagged: The first output position whose score was above the limit, None for none.
        error: What turned it off, where it was to go on without.
        unlike: The first output position at which what it reads was unlike what it was trained on, None for none: its
            scores and its rate of false alarms then say little.
    """

    name: str
    limit: float
    scores: list[float | None] = field(default_factory=list)
    flagged: int | None = None
    error: str | None = None
    unlike: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON has words for."""
        return {
            "name": self.name,
            "limit": self.limit if math.isfinite(self.limit) else None,
            "score": self.scores[-1] if self.scores else None,
            "flagged": self.flagged,
            "scores": self.scores,
            **({} if self.error is None else {"error": self.error}),
            **({} if self.unlike is None else {"unlike_training": self.unlike}),
        }


@dataclass(frozen=True, kw_only=True)
class Monitor(Contract):
    """What watches one text.

    Fields are settings; what it remembers of a text is a state of its own, never changed in place, so that forks share
    it and a text that is taken back has its earlier one again. It sees committed tokens alone, in their order, whatever
    was drafted, and so finds the same with any drafter and in any batch.

    Attributes:
        threshold: Scores above it are flagged; None is the one that its trained part was calibrated at, and where there
            is none nothing is flagged.
        action: What follows.
        errors: Whether an error of it ends the text with that error, or turns it off, which the text's report then
            says.
    """

    threshold: float | None = None
    action: Literal["flag", "stop", "regenerate"] = "flag"
    errors: Literal["raise", "off"] = "raise"

    @property
    def requirements(self) -> Requirements:
        """What it requires of the model.

        `taps`, `prompt_taps` for the prompt's rows, `changes` to steer, `keys` to take tokens back.
        """
        return Requirements()

    @property
    def rollback_tokens(self) -> int:
        """The most tokens that it may take back at a time, which streams hold back."""
        return WHOLE if self.action == "regenerate" else 0

    @property
    def of_action(self) -> Requirements:
        """What its action needs beside that: another seed changes nothing where nothing is left to chance."""
        return Requirements(keys=True, chance=True) if self.action == "regenerate" else Requirements()

    def fits(self, model: Reader) -> None:
        """Raise SettingsError or UnsupportedModel where texts of this model cannot be watched."""
        return

    def check(self, seq: Sequence) -> None:
        """Raise SettingsError, or warn, if a text is of another form than a trained part needs."""
        return

    @abstractmethod
    def start(self, seq: Sequence) -> Any:
        """The state before anything is read."""

    def read(self, state: Any, rows: Prompt) -> Any:
        """The state after further rows of the prompt; asked where `needs.prompt_taps` is set.

        Args:
            state: What `start` or `read` gave before.
            rows: Rows of the prompt that follow.
        """
        return state

    @abstractmethod
    def observe(self, state: Any, row: Row) -> Any:
        """The state after one more committed token.

        Args:
            state: The state before the token.
            row: The token and the row that it was chosen at.
        """

    @abstractmethod
    def score(self, state: Any) -> float | None:
        """How suspicious the text is so far, higher is more; None while nothing is known."""

    @property
    def limit(self) -> float:
        """Scores above it are flagged."""
        return math.inf if self.threshold is None else self.threshold

    def unlike_training(self, state: Any) -> bool:
        """Whether what it read last is unlike what it was trained on."""
        return False

    def act(self, state: Any) -> Action | None:
        """What to do after a token whose score is above the limit."""
        actions: dict[str, Action] = {"stop": Stop(), "regenerate": Regenerate()}
        return actions.get(self.action)

    def resume(self, before: Any, after: Any) -> Any:
        """The state to go on with where tokens were taken back.

        Args:
            before: As it was there.
            after: When it asked.
        """
        return before

    def steering(self, state: Any) -> Hashable | None:
        """What is to change rows from the next one on, None for nothing: `changes` says how."""
        return None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        """The changes that go by `steering`. Each is a function of the row alone, whatever shares its pass."""
        return ()

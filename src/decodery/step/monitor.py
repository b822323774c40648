"""Base class of monitors, which score a text while it is written, and may act on the score."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.requirements import Requirements
from decodery.core.topk import softmax_sums, topk
from decodery.models.hooks import Intervention, Tap
from decodery.models.protocol import Reader

from .sequence import Sequence

T = TypeVar("T")

__all__ = ["Monitor", "Prompt", "Regenerate", "Rollback", "Row", "Stop"]

WHOLE = 1 << 40
"""`Monitor.rollback_tokens` of a monitor that takes back whole texts: more tokens than any text has."""


@dataclass(slots=True, eq=False)
class ScoredRow:
    """Where a row of logits lies until the next pass, and what monitors asked of it, computed once.

    Attributes:
        logits: [n, vocab] of the pass; None once the row was observed, as the next pass may write over it.
        number: Which of these rows it is.
        copied: [vocab] a copy of the row, once a monitor has asked for it.
        sums: `softmax_sums` of the row and its token, once a monitor has asked for one of them.
        computed: By function, what `Row.once` has computed.
    """

    logits: torch.Tensor | None
    number: int
    copied: torch.Tensor | None = None
    sums: tuple[float, float] | None = None
    computed: dict[Any, Any] = field(default_factory=dict)

    def rows(self) -> torch.Tensor:
        """[n, vocab] of the pass."""
        if self.logits is None:
            raise RuntimeError("a row's logits are there while it is observed, and not for a monitor that waits")
        return self.logits


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A committed token, and the row of the pass that predicted it.

    Attributes:
        token: Id of the token.
        position: Its position in the output, 0 for the first.
        final: Whether the text ends after it.
        scored: The row's logits, where the pass wrote them.
        hidden: By tap, [width] hidden state of that row, computed from the tokens before this one.
    """

    token: int
    position: int
    final: bool
    scored: ScoredRow
    hidden: dict[Tap, torch.Tensor]

    @property
    def logits(self) -> torch.Tensor:
        """[vocab] of that row, the model's own; a copy, so a monitor may keep it. Not for one that `waits`."""
        scored = self.scored
        if scored.copied is None:
            scored.copied = scored.rows()[scored.number].clone()
        return scored.copied

    @property
    def logprob(self) -> float:
        """The token's log-probability in nats, by the model's own logits; not below -10,000."""
        return max(self._sums()[0], -1e4)

    @property
    def entropy(self) -> float:
        """The entropy of the row's distribution in nats, by the model's own logits."""
        return self._sums()[1]

    def most_likely(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [k] and logits [k] of the k most likely tokens, best first. Not for a monitor that `waits`.

        Args:
            k: How many; at most the vocabulary.
        """
        number = self.scored.number
        (ids,), (values,) = topk(self.scored.rows()[number : number + 1], k)
        return ids, values

    def once(self, compute: Callable[[torch.Tensor], T]) -> T:
        """The result of a function of the logits, computed once for all monitors. Not for one that `waits`.

        Args:
            compute: A function of a module, which names the result.
        """
        computed = self.scored.computed
        if compute not in computed:
            computed[compute] = compute(self.logits)
        found: T = computed[compute]
        return found

    def _sums(self) -> tuple[float, float]:
        scored = self.scored
        if scored.sums is None:
            if scored.logits is None:
                raise RuntimeError('a monitor that waits has sums with waits = "sums" in its class')
            scored.sums = softmax_sums(scored.logits, scored.number, self.token)
        return scored.sums


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A chunk of the prompt; chunks are read in order.

    Attributes:
        tokens: Token ids.
        hidden: By tap, [n, width] hidden states.
        last: Whether the prompt ends with this chunk.
    """

    tokens: list[int]
    hidden: dict[Tap, torch.Tensor]
    last: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End the text after the last observed token, with the finish reason "content_filter"."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """Take back the last `tokens` tokens.

    Attributes:
        tokens: Number of last tokens to take back.
        ban: Tokens that must not be written at the first of these positions.
        write: Tokens that the text continues with there.
    """

    tokens: int
    ban: tuple[int, ...] = ()
    write: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Take back the whole text and write it again with another seed, a few times at most.

    The last attempt is kept.
    """


Action = Stop | Rollback | Regenerate


@dataclass(slots=True)
class MonitorReport:
    """The report of a monitor about a text.

    Attributes:
        name: Name of the monitor.
        limit: Scores above it are flagged.
        scores: Score after every output token, None where there was none yet.
        flagged: The first output position whose score was above the limit, None for none.
        error: The error that turned the monitor off, where its errors do not end the text.
        unlike: The first output position whose inputs differed from the monitor's training data, None for none. From
            there on its scores and its false positive rate are unreliable.
    """

    name: str
    limit: float
    scores: list[float | None] = field(default_factory=list)
    flagged: int | None = None
    error: str | None = None
    unlike: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
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
    """Scores a text while it is written.

    Fields are settings. The state of a text is never changed in place, so that forks can share it, and a text whose
    tokens are taken back can return to an earlier one. A monitor receives only committed tokens, in order. So its
    scores are the same with any drafter and in any batch.

    Attributes:
        waits: What it needs of tokens that it may be shown some steps later, several at once: "states", hidden states
            alone, or "sums", `Row.logprob` and `Row.entropy` as well; None where it must see each at once, as for
            logits. Waiting costs less; it is done where no monitor of a text acts. An error then ends the text later.
        threshold: Scores above it are flagged; None is the threshold that its trained part was calibrated at, and
            without one no score is flagged.
        action: The action after a flagged score.
        errors: Whether an error of the monitor ends the text with that error, or turns the monitor off, which its
            report then shows.
    """

    waits: ClassVar[Literal["states", "sums"] | None] = None
    threshold: float | None = None
    action: Literal["flag", "stop", "regenerate"] = "flag"
    errors: Literal["raise", "off"] = "raise"

    @property
    def requirements(self) -> Requirements:
        """Its requirements: `taps`, `prompt_taps` for prompts, `changes` to steer, `keys` for rollbacks."""
        return Requirements()

    @property
    def rollback_tokens(self) -> int:
        """Maximum number of tokens that it takes back at a time; streams hold back as many."""
        return WHOLE if self.action == "regenerate" else 0

    @property
    def of_action(self) -> Requirements:
        """The requirements of its action; another seed, for example, needs tokens that are drawn."""
        return Requirements(keys=True, chance=True) if self.action == "regenerate" else Requirements()

    def fits(self, model: Reader) -> None:
        """Raise SettingsError or UnsupportedModel if it does not work with texts of this model."""
        return

    def check(self, seq: Sequence) -> None:
        """Raise SettingsError, or warn, if the form of a text is not that of the trained part's data."""
        return

    @abstractmethod
    def start(self, seq: Sequence) -> Any:
        """The state before the prompt is read."""

    def read(self, state: Any, rows: Prompt) -> Any:
        """The state after a chunk of the prompt; called where `requirements.prompt_taps` is set.

        Args:
            state: The state that `start` or `read` returned before.
            rows: The next chunk of the prompt.
        """
        return state

    @abstractmethod
    def observe(self, state: Any, row: Row) -> Any:
        """The state after one more committed token.

        Args:
            state: The state before the token.
            row: The token and the row that predicted it.
        """

    @abstractmethod
    def score(self, state: Any) -> float | None:
        """Score of the text so far, higher is more suspicious; None while there is none."""

    @property
    def limit(self) -> float:
        """The threshold above which scores are flagged."""
        return math.inf if self.threshold is None else self.threshold

    def unlike_training(self, state: Any) -> bool:
        """Whether the last inputs differ from its training data."""
        return False

    def act(self, state: Any) -> Action | None:
        """The action after a token whose score is above the limit, None for none."""
        actions: dict[str, Action] = {"stop": Stop(), "regenerate": Regenerate()}
        return actions.get(self.action)

    def resume(self, before: Any, after: Any) -> Any:
        """The state to continue with after tokens were taken back.

        Args:
            before: The state before the tokens that were taken back.
            after: The state at which the monitor took them back.
        """
        return before

    def steering(self, state: Any) -> Hashable | None:
        """The key of the interventions on rows from the next one on, None for none; `changes` makes them."""
        return None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        """The interventions for the key `steering`; each must depend only on its own row."""
        return ()

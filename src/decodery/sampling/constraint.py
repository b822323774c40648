"""What a constraint is, token by token, and the processor that lets it decide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import ConstraintError
from decodery.core.requirements import Provides, Requirements

from .logits_processor import Context, LogitsProcessor, Stage


@dataclass(frozen=True)
class AfterCheck:
    """What a constraint leaves to a check of the finished text, because no mask enforces it.

    Args:
        unenforced: what the check sees to, such as "uniqueItems at #/tags".
        ignored: what nothing sees to, such as a format without a grammar.
        max_tries: texts that `LLM.generate` writes at most until one passes; streams and searches write one.
        violation: what a finished text breaks; None for nothing.
    """

    unenforced: tuple[str, ...]
    ignored: tuple[str, ...]
    max_tries: int
    violation: Callable[[str], str | None]


class Constraint(Contract):
    """Which tokens may follow which, with an immutable state per text, so that trees hold many.

    End tokens are tokens like others: allowed exactly where the text may end. Every state that allowed tokens lead to
    allows at least one token; after an end token that is an end token again.

    Attributes:
        bonus: None where what is not allowed is excluded; else nothing is, and the logits of what is not allowed lose
            this much.
        after: What finished texts are checked for; None where the mask enforces all of it.
        stops: Whether a stop string may end a text before it is complete.
    """

    bonus: float | None = None
    after: AfterCheck | None = None
    stops: bool = False

    @property
    def requirements(self) -> Requirements:
        """What it must find: no `ends` where a text that is cut is as good as one that ends."""
        return Requirements(checked=True, ends=True, mask=self.bonus is not None)

    @property
    def provides(self) -> Provides:
        """What rules find: no `mask` where `allowed` costs as much as asking about every token."""
        return Provides(mask=True)

    @abstractmethod
    def init(self, prompt: Sequence[int]) -> Any:
        """The state before the first token after `prompt`."""

    @abstractmethod
    def allowed(self, state: Any) -> np.ndarray:
        """[vocab] bool: which tokens may come next; not to be written to.

        Raises:
            ConstraintError: If this cannot be computed within the limits.
        """

    @abstractmethod
    def advance(self, state: Any, token: int) -> Any:
        """The state one token on; `state` stays as it is.

        Never raises: what is wrong shows in `allowed`.

        Args:
            state: The state before the token; it is not changed.
            token: The id of the next token.
        """

    @abstractmethod
    def is_complete(self, state: Any) -> bool:
        """Whether the text so far is an instance of what was asked for."""

    def completion(self, state: Any, *, thorough: bool = False) -> list[int] | None:
        """A few tokens that complete a text, each allowed in its turn; the end token is not included.

        Args:
            state: Where the text stands.
            thorough: Whether to look far for the fewest, which may take a second.

        Returns:
            These tokens; None where a constraint does not know, so that tokens have to be tried.
        """
        return [] if self.is_complete(state) else None

    def takes(self, state: Any, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next one after another, by a quick check.

        True does not guarantee it.

        Args:
            state: Where the text stands.
            tokens: Ids, in order.
        """
        return True

    def question(self, state: Any) -> Callable[[], object] | None:
        """What must be called before `allowed`, on any thread, because it may take long; None for nothing.

        An engine calls it beside its loop, so that other requests go on meanwhile. Drafts ask no questions.
        """
        return None

    def idle(self, state: Any) -> bool:
        """Whether everything may come next: then no mask is asked for, and nothing is spent on one."""
        return False

    def permits(self, state: Any, token: int) -> bool:
        """Whether `token` may come next, as far as a quick look can tell: False is certain, True need not be."""
        return self.bonus is not None or self.accepts(state, token)

    def accepts(self, state: Any, token: int) -> bool:
        """Whether `token` may come next, exactly as `allowed` says it; for code that checks few tokens."""
        return bool(self.allowed(state)[token])

    def forced(self, state: Any, most: int) -> list[int]:
        """At most `most` tokens that come next whatever the model says, because nothing else is allowed."""
        tokens: list[int] = []
        while len(tokens) < most and self.bonus is None and self.question(state) is None and not self.idle(state):
            allowed = self.allowed(state)
            first = int(allowed.argmax())
            if np.count_nonzero(allowed) != 1:
                break
            tokens.append(first)
            state = self.advance(state, first)
        return tokens


@dataclass(frozen=True)
class Constrained(LogitsProcessor):
    """Excludes what a constraint does not allow, or favours what it does.

    It goes before all other processors, so that these leave something.

    The distribution is the model's own at each token, masked and renormalised: not the model's distribution over whole
    texts given the constraint.
    """

    constraint: Constraint

    stage = Stage.MASK
    stateful = True
    hears_logprobs = False

    @property
    def requirements(self) -> Requirements:
        return self.constraint.requirements

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        free = [self._free(context) for context in contexts]
        if all(free):
            return logits
        anything = np.ones(logits.shape[-1], dtype=bool)
        masks = [
            anything if every else self.constraint.allowed(context.state)
            for every, context in zip(free, contexts, strict=True)
        ]
        for mask in masks:
            if len(mask) != logits.shape[-1]:
                raise ConstraintError(f"the constraint is for {len(mask)} tokens, the model has {logits.shape[-1]}")
        bonus = self.constraint.bonus
        if logits.device.type != "cpu":
            kept = torch.from_numpy(np.stack(masks)).to(logits.device, non_blocking=True)
            return logits.masked_fill(~kept, -torch.inf) if bonus is None else torch.where(kept, logits, logits - bonus)
        # In numpy, which wakes no threads between two passes.
        given = logits.numpy()
        rest = np.float32(-np.inf) if bonus is None else given - np.float32(bonus)
        rows = np.where(masks[0] if len(masks) == 1 else np.stack(masks), given, rest)
        if np.isneginf(rows.max(axis=-1)).any():
            raise ConstraintError("the constraint allows no token the model could write: nothing can be decoded")
        return torch.from_numpy(rows)

    def _free(self, context: Context) -> bool:
        """Whether no mask is asked for."""
        if context.draft and self.constraint.question(context.state) is not None:
            return True
        return self.constraint.idle(context.state)

    def init(self, prompt: Sequence[int]) -> Any:
        return self.constraint.init(prompt)

    def advance(self, state: Any, token: int, logprob: float) -> Any:
        return self.constraint.advance(state, token)


def constrained(processors: Sequence[LogitsProcessor]) -> tuple[int, Constraint] | None:
    """The number of the processor that holds a constraint, and the constraint; None where there is none."""
    for number, processor in enumerate(processors):
        if isinstance(processor, Constrained):
            return number, processor.constraint
    return None

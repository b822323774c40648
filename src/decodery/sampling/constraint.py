"""The interface of compiled constraints, which allow or exclude single tokens, and the processor that applies one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import ConstraintError
from decodery.core.requirements import Provides, Requirements

from .logits_processor import Context, LogitsProcessor, Stage


@dataclass(frozen=True)
class AfterCheck:
    """The part of a constraint that is checked in the finished text, because no mask enforces it.

    Attributes:
        unenforced: Keywords that the check covers, such as "uniqueItems at #/tags".
        ignored: Keywords that are neither enforced nor checked, such as a format without a grammar.
        max_tries: Maximum number of texts that `LLM.generate` writes until one passes; streams and searches write one.
        violation: Returns what a finished text violates; None for no violation.
    """

    unenforced: tuple[str, ...]
    ignored: tuple[str, ...]
    max_tries: int
    violation: Callable[[str], str | None]


class Constraint(Contract):
    """Decides which tokens may come next, with an immutable state per text or node of a tree.

    End tokens are tokens like others: they are allowed exactly where the text may end. Every state that allowed tokens
    lead to allows at least one token; after an end token that is an end token again.

    Attributes:
        bonus: None excludes tokens that are not allowed. A number excludes none, and subtracts it from the logits of
            tokens that are not allowed.
        after: The check of finished texts; None where the mask enforces the whole constraint.
        stops: Whether a stop string may end a text before it is complete.
    """

    bonus: float | None = None
    after: AfterCheck | None = None
    stops: bool = False

    @property
    def requirements(self) -> Requirements:
        """Its requirements; without `ends` where a text that is cut off is as valid as one that ends."""
        return Requirements(checked=True, ends=True, mask=self.bonus is not None)

    @property
    def provides(self) -> Provides:
        """What it provides to acceptance rules; without `mask` where `allowed` checks every token singly."""
        return Provides(mask=True)

    @abstractmethod
    def init(self, prompt: Sequence[int]) -> Any:
        """The state before the first token after `prompt`."""

    @abstractmethod
    def allowed(self, state: Any) -> np.ndarray:
        """[vocab] bool: tokens that may come next; the array must not be changed.

        Raises:
            ConstraintError: If this cannot be computed within the limits.
        """

    def bits(self, state: Any, vocab_size: int) -> np.ndarray:
        """[words] int32: tokens that may come next, as kernels read them.

        Token t is bit `t % 32` of word `t // 32`, the lowest first. The array must not be changed.

        Args:
            state: The state after the text so far.
            vocab_size: Size of the model's vocabulary.

        Raises:
            ConstraintError: If this cannot be computed within the limits, or is for another vocabulary.
        """
        if self.idle(state):
            return _every(vocab_size)
        mask = self.allowed(state)
        require_size(len(mask), vocab_size)
        return packed(mask)

    @abstractmethod
    def advance(self, state: Any, token: int) -> Any:
        """Return the state after one more token.

        Never raises; after a token that is not allowed, `allowed` reports the error.

        Args:
            state: The state before the token; it is not changed.
            token: The id of the next token.
        """

    @abstractmethod
    def is_complete(self, state: Any) -> bool:
        """Whether the text so far satisfies the constraint."""

    def completion(self, state: Any, *, thorough: bool = False) -> list[int] | None:
        """Find a few tokens that complete a text; each is allowed after the ones before it.

        Args:
            state: The state after the text so far.
            thorough: Whether to search longer for the fewest tokens, which may take a second.

        Returns:
            The tokens without the end token; None where the constraint has no such search, so that tokens must be
            tried.
        """
        return [] if self.is_complete(state) else None

    def takes(self, state: Any, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next in this order, by a quick check.

        False is certain; True is not a guarantee.

        Args:
            state: The state after the text so far.
            tokens: Ids, in order.
        """
        return True

    @property
    def asks(self) -> bool:
        """Whether `question` ever returns a computation."""
        return type(self).question is not Constraint.question

    def question(self, state: Any) -> Callable[[], object] | None:
        """A slow computation that must run before `allowed`, on any thread; None where there is none.

        The engine runs it in a worker thread, so that other requests continue meanwhile. Drafts skip it.
        """
        return None

    def idle(self, state: Any) -> bool:
        """Whether all tokens may come next, so that no mask is computed."""
        return False

    def permits(self, state: Any, token: int) -> bool:
        """Whether `token` may come next, by a quick check: False is certain, True is not a guarantee."""
        return self.bonus is not None or self.accepts(state, token)

    def accepts(self, state: Any, token: int) -> bool:
        """Whether `token` may come next, exactly as in `allowed`; for code that checks few tokens."""
        return bool(self.allowed(state)[token])

    def forced(self, state: Any, most: int) -> list[int]:
        """At most `most` forced tokens: those that come next because no other token is allowed."""
        tokens: list[int] = []
        while len(tokens) < most and self.bonus is None and self.question(state) is None and not self.idle(state):
            allowed = self.allowed(state)
            first = int(allowed.argmax())
            if np.count_nonzero(allowed) != 1:
                break
            tokens.append(first)
            state = self.advance(state, first)
        return tokens


def packed(mask: np.ndarray) -> np.ndarray:
    """A mask [vocab] bool as `Constraint.bits`."""
    found = np.zeros((len(mask) + 31) // 32, dtype=np.int32)
    whole = np.packbits(np.asarray(mask, dtype=bool), bitorder="little")
    found.view(np.uint8)[: len(whole)] = whole
    return found


@lru_cache(maxsize=8)
def _every(vocab_size: int) -> np.ndarray:
    """`Constraint.bits` where all tokens may come next."""
    found = packed(np.ones(vocab_size, dtype=bool))
    found.flags.writeable = False
    return found


def require_size(own: int, vocab_size: int) -> None:
    """Raise ConstraintError where a constraint is for another number of tokens than the model has."""
    if own != vocab_size:
        raise ConstraintError(f"the constraint is for {own} tokens, the model has {vocab_size}")


@dataclass(frozen=True)
class Constrained(LogitsProcessor):
    """Excludes tokens that a constraint does not allow, or makes them less likely.

    It is applied before all other processors, so that their truncations keep an allowed token.

    At each token the model's distribution is masked and renormalised. This differs from the model's distribution over
    whole texts given the constraint.
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
            require_size(len(mask), logits.shape[-1])
        bonus = self.constraint.bonus
        if logits.device.type != "cpu":
            kept = torch.from_numpy(np.stack(masks)).to(logits.device, non_blocking=True)
            return logits.masked_fill(~kept, -torch.inf) if bonus is None else torch.where(kept, logits, logits - bonus)
        # In numpy, which wakes no threads between two passes.
        given = logits.numpy()
        rest = np.float32(-np.inf) if bonus is None else given - np.float32(bonus)
        rows = np.where(masks[0] if len(masks) == 1 else np.stack(masks), given, rest)
        if np.isneginf(rows.max(axis=-1)).any():
            raise ConstraintError(
                "the constraint allows none of the tokens that the model could write: use another constraint or model"
            )
        return torch.from_numpy(rows)

    def _free(self, context: Context) -> bool:
        """Whether no mask is needed."""
        if context.draft and self.constraint.question(context.state) is not None:
            return True
        return self.constraint.idle(context.state)

    def init(self, prompt: Sequence[int]) -> Any:
        return self.constraint.init(prompt)

    def advance(self, state: Any, token: int, logprob: float) -> Any:
        return self.constraint.advance(state, token)


def constrained(processors: Sequence[LogitsProcessor]) -> tuple[int, Constraint] | None:
    """Index of the processor with a constraint, and the constraint; None where there is none."""
    for number, processor in enumerate(processors):
        if isinstance(processor, Constrained):
            return number, processor.constraint
    return None

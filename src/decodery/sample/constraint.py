"""What a constraint is, token by token, and the warp that lets it decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..errors import ConstraintError
from .base import Context, Stage, Warp


class Constraint(ABC):
    """Which tokens may follow which: a state per text, never changed from outside, so that trees can hold many.

    End tokens are tokens like others: allowed exactly where the text may end. Every state that allowed tokens lead to
    allows at least one token; after an end token that is an end token again.
    masked: whether `allowed` costs less than asking about every token would.
    """

    masked: ClassVar[bool] = True

    @abstractmethod
    def init(self, prompt: Sequence[int]) -> Any:
        """The state before the first token after `prompt`."""

    @abstractmethod
    def allowed(self, state: Any) -> np.ndarray:
        """[vocab] bool: which tokens may come next; not to be written to.

        Raises ConstraintError where this cannot be worked out within the limits.
        """

    @abstractmethod
    def advance(self, state: Any, token: int) -> Any:
        """The state one token on; `state` stays as it is. Never raises: what is wrong shows in `allowed`."""

    @abstractmethod
    def is_complete(self, state: Any) -> bool:
        """Whether the text so far is an instance of what was asked for."""

    def permits(self, state: Any, token: int) -> bool:
        """Whether `token` may come next, as far as a quick look can tell: False is certain, True need not be."""
        return self.accepts(state, token)

    def accepts(self, state: Any, token: int) -> bool:
        """Whether `token` may come next, exactly as `allowed` says it; for whoever asks about few tokens."""
        return bool(self.allowed(state)[token])

    def forced(self, state: Any, most: int) -> list[int]:
        """At most `most` tokens that come next whatever the model says, because nothing else is allowed."""
        tokens: list[int] = []
        while len(tokens) < most:
            allowed = self.allowed(state)
            first = int(allowed.argmax())
            if np.count_nonzero(allowed) != 1:
                break
            tokens.append(first)
            state = self.advance(state, first)
        return tokens


@dataclass(frozen=True)
class Constrained(Warp):
    """Excludes what a constraint does not allow. It goes before all other warps, so that these leave something.

    The distribution is the model's own at each token, masked and renormalised: not the model's distribution over whole
    texts given the constraint.
    """

    constraint: Constraint

    stage = Stage.MASK
    stateful = True
    hears_logprobs = False

    def warp(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        masks = [self.constraint.allowed(context.state) for context in contexts]
        for mask in masks:
            if len(mask) != logits.shape[-1]:
                raise ConstraintError(f"the constraint is for {len(mask)} tokens, the model has {logits.shape[-1]}")
        if logits.device.type != "cpu":
            kept = torch.from_numpy(np.stack(masks)).to(logits.device, non_blocking=True)
            return logits.masked_fill(~kept, -torch.inf)
        # In numpy, which wakes no threads between two passes.
        rows = np.where(masks[0] if len(masks) == 1 else np.stack(masks), logits.numpy(), np.float32(-np.inf))
        if np.isneginf(rows.max(axis=-1)).any():
            raise ConstraintError("the constraint allows no token the model could write: nothing can be decoded")
        return torch.from_numpy(rows)

    def init(self, prompt: Sequence[int]) -> Any:
        return self.constraint.init(prompt)

    def advance(self, state: Any, token: int, logprob: float) -> Any:
        return self.constraint.advance(state, token)


def constrained(warps: Sequence[Warp]) -> tuple[int, Constraint] | None:
    """The number of the warp that holds a constraint, and the constraint; None where there is none."""
    for number, warp in enumerate(warps):
        if isinstance(warp, Constrained):
            return number, warp.constraint
    return None

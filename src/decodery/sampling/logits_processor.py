"""What a processor is: one stage between a model's logits and the distribution that is sampled."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.requirements import Provides, Requirements

__all__ = ["Context", "LogitsProcessor", "Stage"]


class Stage(IntEnum):
    """Where a processor stands in the default order; under temperature 0 the last two are skipped."""

    MASK = 1
    EDIT = 2
    TEMPERATURE = 3
    TRUNCATION = 4


@dataclass(slots=True)
class Context:
    """The history of one node: everything before the position whose token is to be chosen.

    Attributes:
        prompt_length: How many of `tokens` are prompt.
        tokens: Prompt, generated tokens and the node's own path.
        state: In `Sampler.law` one entry per processor, () where the processor remembers nothing; a processor sees only
            its own entry.
        seed: The request's, for processors that draw (from the stateless noise, so that every node can be asked again).
        draft: A drafter asks, so that a mask may be left out.
    """

    prompt_length: int
    tokens: list[int]
    state: Any = ()
    seed: int = 0
    draft: bool = False

    @property
    def position(self) -> int:
        """Index of the output token to choose, 0 for the first one after the prompt."""
        return len(self.tokens) - self.prompt_length


class LogitsProcessor(Contract):
    """Turns logits into logits; a frozen dataclass whose fields are its settings.

    A row's result depends on that row and its context only, never on what else is in the call. Excluded tokens are
    -inf; every row keeps at least one finite entry. Settings out of range raise SettingsError when it is made.

    Attributes:
        stage: When it is applied, see `Stage`.
        stateful: Whether it remembers something of a text.
        hears_logprobs: Whether a stateful one wants to know how likely a token was.
    """

    stage: ClassVar[Stage]
    stateful: ClassVar[bool] = False
    hears_logprobs: ClassVar[bool] = True

    @property
    def requirements(self) -> Requirements:
        """What it must find: a truncation looks at what the mask of a constraint has left."""
        return Requirements(mask=self.stage is Stage.TRUNCATION)

    @property
    def provides(self) -> Provides:
        """What others find in its result: no `law` where that only says which token is best."""
        return Provides(law=True)

    @property
    def greedy(self) -> bool:
        """True where nothing is left to chance: the token is the argmax after masks and edits."""
        return False

    @property
    def neutral(self) -> bool:
        """True when the settings make this processor the identity."""
        return False

    @abstractmethod
    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        """Warped logits [n, V] float32 of `logits` [n, V] float32 and the n contexts of its rows.

        Never in place; returns `logits` itself when nothing changes.

        Args:
            logits: [n, V] float32, not to be changed.
            contexts: The history of each row.
        """

    def init(self, prompt: Sequence[int]) -> Any:
        """State before the first output token; () for a processor that remembers nothing."""
        return ()

    def advance(self, state: Any, token: int, logprob: float) -> Any:
        """State after `token`, whose natural log-probability under this processor's input is `logprob`; pure.

        logprob is NaN for a processor that does not hear them.

        Args:
            state: The state before the token; it is not changed.
            token: The id of the chosen token.
            logprob: Its natural log-probability under this processor's input; NaN unless `hears_logprobs`.
        """
        return state


def require_number(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> None:
    """Raise SettingsError unless `value` is a finite number with above < value, least <= value <= most.

    Args:
        name: What the setting is called in the error.
        value: The setting.
        above: Exclusive lower bound, None for none.
        least: Inclusive lower bound, None for none.
        most: Inclusive upper bound, None for none.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not (value > above and least <= value <= most):
        bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {least:g}"] * (least > -math.inf)
        bounds += [f"at most {most:g}"] * (most < math.inf)
        what = " ".join(["a finite number", " and ".join(bounds)]).strip()
        raise SettingsError(f"{name} must be {what}, not {value!r}")


def require_count(name: str, value: Any) -> None:
    """Raise SettingsError unless `value` is a integer, 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingsError(f"{name} must be an integer of at least 0, not {value!r}")

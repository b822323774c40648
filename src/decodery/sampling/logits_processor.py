"""Base class of logits processors, the stages between a model's logits and the distribution that is sampled."""

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
    """Stage of a processor in the default order; at temperature 0 the last two stages are skipped."""

    MASK = 1
    EDIT = 2
    TEMPERATURE = 3
    TRUNCATION = 4


@dataclass(slots=True)
class Context:
    """The history of one node: all tokens before the position whose token is chosen.

    Attributes:
        prompt_length: Number of `tokens` that are prompt.
        tokens: Prompt, generated tokens and the node's own path.
        state: In `Sampler.law` one entry per processor, () for a stateless one; each processor receives only its entry.
        seed: Seed of the request, for processors that draw; with stateless noise, repeated calls give the same result.
        draft: Whether this is for a drafter, so that a mask may be left out.
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
    """Maps logits to logits; a frozen dataclass whose fields are its settings.

    The result of a row depends only on that row and its context, never on other rows of the call. Excluded tokens are
    -inf; every row keeps at least one finite entry. Settings out of range raise SettingsError in the constructor.

    Attributes:
        stage: When it is applied, see `Stage`.
        stateful: Whether it has a state per text.
        hears_logprobs: Whether `advance` needs the log-probability of each token.
    """

    stage: ClassVar[Stage]
    stateful: ClassVar[bool] = False
    hears_logprobs: ClassVar[bool] = True

    @property
    def requirements(self) -> Requirements:
        """Its requirements; a truncation needs the logits after the mask of a constraint."""
        return Requirements(mask=self.stage is Stage.TRUNCATION)

    @property
    def provides(self) -> Provides:
        """What its result provides; without `law` where it only marks the best token."""
        return Provides(law=True)

    @property
    def greedy(self) -> bool:
        """True where no token is drawn: the token is the argmax after masks and edits."""
        return False

    @property
    def neutral(self) -> bool:
        """True when the settings make this processor the identity."""
        return False

    @abstractmethod
    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        """Process the logits of n rows.

        Args:
            logits: [n, V] float32; they must not be changed in place.
            contexts: The history of each row.

        Returns:
            [n, V] float32; `logits` itself where nothing changes.
        """

    def init(self, prompt: Sequence[int]) -> Any:
        """State before the first output token; () for a stateless processor."""
        return ()

    def advance(self, state: Any, token: int, logprob: float) -> Any:
        """State after one more token; pure.

        Args:
            state: The state before the token; it is not changed.
            token: The id of the chosen token.
            logprob: Its natural log-probability under this processor's input; NaN unless `hears_logprobs`.
        """
        return state


def require_number(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> None:
    """Raise SettingsError unless `value` is a finite number with above < value and least <= value <= most.

    Args:
        name: Name of the setting in the error.
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
    """Raise SettingsError unless `value` is an integer of 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingsError(f"{name} must be an integer of at least 0, not {value!r}")

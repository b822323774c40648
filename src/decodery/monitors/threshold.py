"""A threshold that is calibrated: how often it flags what is harmless is stated, and holds for so few examples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError
from decodery.step.sequence import Sequence

__all__ = ["Threshold"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Scores above `value` are flagged.

    Attributes:
        rate: The share of harmless texts flagged at most, if they are like the `harmless` ones it was set on.
        data: What these were.
        chat: Whether their prompts had the model's chat template, None where that is not known.
        tokens: The most that they could have, None where the length is of no account.
        unit: What the rate is of: a "text", or a "conversation" with all its answers.
    """

    value: float
    rate: float
    harmless: int
    data: str
    chat: bool | None = None
    tokens: int | None = None
    unit: str = "text"

    @classmethod
    def calibrated(
        cls,
        scores: Iterable[float],
        rate: float,
        data: str,
        *,
        chat: bool | None = None,
        tokens: int | None = None,
        unit: str = "text",
    ) -> Threshold:
        """The least threshold that keeps the promise, from the scores of n harmless texts.

        Args:
            scores: Of each text the one that decides, which is the highest where any token may be flagged.
            chat, tokens, unit: Of the texts. That is their ceil((n + 1) * (1 - rate))-th least score: a further text of
                the same kind then exceeds it with probability `rate` at most, whatever their distribution and however
                few they are (split conformal prediction).

        Raises:
            SettingsError: If n is too small for any threshold to promise that.
        """
        found = sorted(scores)
        if not 0 < rate < 1:
            raise SettingsError(f"a false-positive rate lies between 0 and 1, not {rate}")
        if found and not all(map(math.isfinite, found)):
            raise SettingsError("a threshold needs finite scores")
        # Rounded, because 0.95 * 20 is no 19 in floating point.
        place = math.ceil(round((len(found) + 1) * (1 - rate), 9))
        if place > len(found):
            raise SettingsError(
                f"a false-positive rate of {rate} cannot be promised from {len(found)} harmless texts: give at least "
                f"{math.ceil(round(1 / rate, 9)) - 1}, or ask for a higher rate"
            )
        return cls(found[place - 1], rate, len(found), data, chat, tokens, unit)

    def check(self, seq: Sequence, name: str, made: str, *, own: bool) -> None:
        """Say where a text is of another form than those that the threshold was set on.

        Args:
            seq: the text, before anything is read.
            name: of the monitor.
            made: how to make what would fit.
            own: whether the request gives a threshold of its own, which promises no rate.

        Raises:
            SettingsError: the prompt has the chat template and the prompts it was set on had not, or the other way
                round. With a threshold of the request's own that is a warning.
        """
        if (
            self.chat is not None
            and seq.request.conversation is not None
            and seq.request.conversation.apply_chat_template != self.chat
        ):
            had, has = ("with", "without") if self.chat else ("without", "with")
            said = f"{name} was trained on prompts {had} the chat template, and this prompt is {has} it: {made}"
            if not own:
                raise SettingsError(f"{said} on prompts like this one, or give threshold=NUMBER")
            warnings.warn(said, stacklevel=2)
        if self.tokens is not None and not own and seq.request.max_new_tokens > self.tokens:
            warnings.warn(
                f"{name}: the rate of {self.rate:g} is promised for texts of up to {self.tokens} tokens, and this one "
                "may have more: train it with a larger --max-new-tokens, or give fewer max_new_tokens",
                stacklevel=2,
            )

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Threshold:
        """What `facts` gave.

        Raises:
            CorruptFile: For anything else.
        """
        try:
            value, rate, harmless = float(facts["value"]), float(facts["rate"]), int(facts["harmless"])
            chat, tokens, unit = facts.get("chat"), facts.get("tokens"), facts.get("unit", "text")
            if chat not in (None, True, False) or not (tokens is None or (type(tokens) is int and tokens > 0)):
                raise ValueError(f"{chat} or {tokens} is no form of text")
            if unit not in ("text", "conversation"):
                raise ValueError(f"{unit} is no unit")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFile("a trained monitor has no threshold: train it again") from error
        if not math.isfinite(value) or not 0 < rate < 1:
            raise CorruptFile("a trained monitor has no threshold that means anything: train it again")
        return cls(value, rate, harmless, str(facts.get("data", "")), chat, tokens, unit)

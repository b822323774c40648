"""A threshold that is calibrated: how often it flags what is harmless is stated, and holds for so few examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CorruptFile, SettingsError

__all__ = ["Threshold"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Scores above `value` are flagged.

    rate: the share of harmless texts flagged at most, if they are like the `harmless` ones it was set on. data: what
    these were.
    """

    value: float
    rate: float
    harmless: int
    data: str

    @classmethod
    def calibrated(cls, scores: Iterable[float], rate: float, data: str) -> Threshold:
        """The least threshold that keeps the promise, from the scores of n harmless texts.

        That is their ceil((n + 1) * (1 - rate))-th least score: a further text of the same kind then exceeds it with
        probability `rate` at most, whatever their law and however few they are (split conformal prediction).
        Raises SettingsError where n is too small for any threshold to promise that.
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
        return cls(found[place - 1], rate, len(found), data)

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {"value": self.value, "rate": self.rate, "harmless": self.harmless, "data": self.data}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Threshold:
        """What `facts` gave. Raises CorruptFile for anything else."""
        try:
            value, rate, harmless = float(facts["value"]), float(facts["rate"]), int(facts["harmless"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFile("a trained monitor lacks its threshold: train it again") from error
        if not math.isfinite(value) or not 0 < rate < 1:
            raise CorruptFile("a trained monitor has no threshold that means anything: train it again")
        return cls(value, rate, harmless, str(facts.get("data", "")))

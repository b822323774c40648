"""Bounds of settings, which stand beside their defaults."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from decodery.core.errors import SettingsError

COUNT, POSITIVE, NON_NEGATIVE, SHARE = "[1, inf)", "(0, inf)", "[0, inf)", "(0, 1)"
_USUAL = {"steps": COUNT, "batch": COUNT, "epochs": POSITIVE, "lr": POSITIVE}
"""Of settings of these names, unless they have others."""


def bounded(default: Any, bounds: str) -> Any:
    """A field of settings.

    Args:
        default: Its default.
        bounds: The interval of its values, such as "[0, 1)" for 0 and all up to 1, but for 1.
    """
    return field(default=default, metadata={"bounds": bounds})


class Bounded:
    """Base of settings, dataclasses, whose values are refused outside of their bounds."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            bounds, value = each.metadata.get("bounds", _USUAL.get(each.name)), getattr(self, each.name)
            if bounds is not None and not _inside(value, bounds):
                raise SettingsError(f"{each.name} is {value}: give one in {bounds}")


def _inside(value: float, bounds: str) -> bool:
    low, high = map(float, bounds[1:-1].split(","))
    return low < value < high or (bounds[0] == "[" and value == low) or (bounds[-1] == "]" and value == high)

"""Numbers of a JSON schema, in the form the engine computes with exactly: it reads them in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from decodery.core.errors import ConstraintError

_MOST_EXACT = 2**53
_NEAREST = 1e-15
"""Above 0, for numbers under an exclusive bound of 0."""
_MOST_STEP = 2**32 - 1
_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def bounded(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema with bounds the engine does not round.

    A bound it would round is moved inward, or refused.

    Raises:
        ConstraintError: For that and for what is no number.
    """
    done = dict(schema)
    for low, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        # Draft 4 says with a boolean that the other bound is exclusive.
        if isinstance(done.get(exclusive), bool) and done.pop(exclusive) and low in done:
            done[exclusive] = done.pop(low)
    for word in _WORDS:
        if word in done:
            done[word] = _exact(done[word], word, f"{path}/{word}")
    for word, inclusive, up in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        value = done.get(word)
        # The engine lets a integer pass that is excluded, if the other bound is nearer than the next one.
        if value is not None and value * up >= 0 and float(value).is_integer():
            del done[word]
            moved = math.nextafter(value, math.inf * up) if value else up * _NEAREST
            done[inclusive] = max(moved * up, done.get(inclusive, moved) * up) * up
    return done


def _exact(value: Any, word: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        raise ConstraintError(f"the JSON schema is wrong at {path}: it must be a number")
    if word == "multipleOf" and value <= 0:
        raise ConstraintError(f"the JSON schema is wrong at {path}: it must be above 0")
    if abs(value) <= _MOST_EXACT:
        return value or 0
    outward = value > 0 if word in ("maximum", "exclusiveMaximum") else value < 0
    if word == "multipleOf" or not outward:
        raise ConstraintError(f"the JSON schema's {word!r} at {path} is beyond what can be enforced exactly, 2^53")
    return _MOST_EXACT if value > 0 else -_MOST_EXACT


def _finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def require_exact(value: Any, path: str) -> None:
    """Raise ConstraintError for a literal that the engine would write as another number."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, int | float) and not isinstance(each, bool) and not _written(each):
            raise ConstraintError(
                f"the JSON schema holds a number at {path} that is beyond what can be enforced exactly, 2^53: write "
                "it as a text"
            )


def _written(value: int | float) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        near = float(value)
    except OverflowError:
        return False
    # Below 2^63 the engine writes integers digit by digit, beyond it the shortest digits that mean the double.
    return near == value if abs(value) < 2**63 else Decimal(repr(near)) == value


def require_common_multiple(steps: Sequence[float]) -> None:
    """Raise ConstraintError where the engine could overflow, in 32 bits, when two of the steps meet."""
    different = {Fraction(repr(step)) for step in steps}
    if len(different) < 2:
        return
    scale = max(_denominators(different))
    common = 1
    for step in different:
        whole = int(step * scale)
        if common * whole > _MOST_STEP:
            raise ConstraintError("the JSON schema uses 'multipleOf' with numbers whose common multiple is too large")
        common = math.lcm(common, whole)


def _denominators(steps: set[Fraction]) -> Iterator[int]:
    """Powers of ten that make every step whole."""
    for step in steps:
        scale = 1
        while (step * scale).denominator != 1:
            scale *= 10
        yield scale

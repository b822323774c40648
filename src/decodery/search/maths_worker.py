"""Answers compared as mathematics, in a process of its own: what takes too long is ended. See `core.worker_pool`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def begin() -> Callable[[tuple[str, list[str]]], tuple[int | None, float]]:
    from math_verify import LatexExtractionConfig, parse, verify

    # The limits of time are kept by the process that asks.
    logging.disable(logging.CRITICAL)

    @lru_cache(maxsize=4096)
    def read(answer: str) -> tuple[Any, Any]:
        """What math-verify makes of an answer, and its value, where it is one."""
        try:
            found = parse(
                f"\\boxed{{{answer}}}",
                extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
                fallback_mode="no_fallback",
                parsing_timeout=None,
            )
        except Exception:
            # A parser of models' texts meets unexpected input.
            return [], None
        # Of a percentage math-verify knows two values.
        return found, None if not found or "%" in answer else _value(found[0])

    def equal(one: str, other: str) -> bool:
        (first, value), (second, other_value) = read(one), read(other)
        if not first or not second or _differ(value, other_value):
            return False
        try:
            return bool(verify(first, second, timeout_seconds=None) or verify(second, first, timeout_seconds=None))
        except Exception:
            return False

    def same(question: tuple[str, list[str]]) -> tuple[int | None, float]:
        """The number of the answer that this one is the same as, and the seconds that took."""
        began = time.process_time()
        answer, known = question
        read(answer)
        found = next((number for number, other in enumerate(known) if equal(other, answer)), None)
        return found, time.process_time() - began

    return same


def _value(expression: Any) -> Any:
    """What two equal expressions have in common: a number, with one for each variable, or several in a tuple.

    None where nothing is known, so that this alone tells nothing.
    """
    import sympy

    if isinstance(expression, sympy.Interval):
        return (
            bool(expression.left_open),
            bool(expression.right_open),
            _value(expression.start),
            _value(expression.end),
        )
    if isinstance(expression, sympy.Tuple):
        return tuple(map(_value, expression.args))
    if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.MatrixExpr):
        return None
    try:
        names = sorted(expression.free_symbols, key=str)
        # Roots of small integers: nothing that an answer would hold itself.
        at = {name: sympy.Float((_hashed(str(name)) % 997 + 2) ** 0.5 / 7) for name in names}
        return complex(expression.subs(at).evalf(15))
    except Exception:
        return None


def _hashed(name: str) -> int:
    """The same number for a name in every process."""
    return int.from_bytes(name.encode(), "big")


def _differ(one: Any, other: Any) -> bool:
    """Whether values are certainly not of equal expressions."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) != len(other) or any(map(_differ, one, other))
    if isinstance(one, complex) and isinstance(other, complex):
        # Decimals are compared to six places.
        return abs(one - other) > 1e-4 * max(1.0, abs(one))
    return type(one) is type(other) is bool and one != other

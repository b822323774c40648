"""What the judges of archon say, read: rankings, critiques and verdicts in brackets."""

from __future__ import annotations

import re

_INDEX = re.compile(r"\[(\d{1,4})\]")
_ORDER = re.compile(
    r"\[\d{1,4}\](?:[ \t*]*>[ \t*]*\[\d{1,4}\])+|^[ \t*]*(?:answer:)?[ \t*]*\[\d{1,4}\][ \t*.]*$", re.M | re.I
)
_NUMBERED = re.compile(r"^[ \t>#*_-]*\[(\d{1,4})\][*_]*", re.MULTILINE)
_VERDICT = re.compile(r"\[(in)?correct\]", re.IGNORECASE)
_RESULT = re.compile(r"^[^\w\n]*(?:unit )?(?:test )?#?(\d{1,4})\b([^\n]*)", re.MULTILINE | re.IGNORECASE)
_PASSED = re.compile(r"\[(passed|failed)\]", re.IGNORECASE)


def ranking(said: str, n: int) -> list[int] | None:
    """An order of n candidates by the last ranking in brackets.

    Args:
        said: A text with a ranking, such as [2] > [1].
        n: The number of candidates.

    Returns:
        Their numbers, from 0: those named twice once, those not named last; None without a ranking.
    """
    found = [[int(index) - 1 for index in _INDEX.findall(each[0])] for each in _ORDER.finditer(said)]
    named = [[index for index in each if 0 <= index < n] for each in found]
    last = next(filter(None, reversed(named)), None)
    return None if last is None else list(dict.fromkeys([*last, *range(n)]))


def sections(said: str, n: int) -> list[str] | None:
    """What stands after [1] to [n], each of which is there once; None otherwise."""
    marks = list(_NUMBERED.finditer(said))
    if sorted(int(mark[1]) for mark in marks) != [*range(1, n + 1)]:
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(said)]
    found = {int(mark[1]): said[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}
    return [found[number] for number in range(1, n + 1)]


def correct(said: str) -> bool | None:
    """A verdict in brackets; None where there is none, or both."""
    found = {verdict[1] is None for verdict in _VERDICT.finditer(said)}
    return found.pop() if len(found) == 1 else None


def passed(said: str, tests: int) -> int | None:
    """How many of the tests are said to be passed; the last line on each counts.

    None where one has no verdict.
    """
    results: dict[int, bool] = {}
    for number, line in _RESULT.findall(said):
        verdict = {found.lower() for found in _PASSED.findall(line)}
        if len(verdict) == 1:
            results[int(number)] = verdict == {"passed"}
    if any(number not in results for number in range(1, tests + 1)):
        return None
    return sum(results[number] for number in range(1, tests + 1))

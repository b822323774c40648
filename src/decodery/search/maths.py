"""Answers that are the same in mathematics, however they are spelt: \\frac{1}{2} and 0.5, but not \\sqrt{3} and 3."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from decodery.core.worker_pool import LAST, NotStarted, Unanswered, WorkerPool

_LONGEST = 200
"""Characters of an answer that is compared; a longer one is the same only where it is spelt the same."""
_MOST_AROUND = 1000
"""Characters of an answer with the words around it."""
_SECONDS, _ALL_SECONDS = 1.0, 5.0
"""Of work that it may take to compare one answer with the others, and all of them."""
_MOST_FAILURES = 2
"""Formulas that take too long, after which no other one of a search is compared: each costs a new process."""
_MEMORY = 2 << 30
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_MIXED = re.compile(r"(?<![\w.,/])(\d+)\s+(\d+)/(\d+)(?![\w.,/])")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FUNCTIONS = re.compile(r"\b(?:sqrt|sin|cos|tan|log|ln|exp|pi)(?![a-z])")
_DELIMITED = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_workers = WorkerPool(Path(__file__).with_name("maths_worker.py"), memory=_MEMORY, nice=LAST)


def formula(answer: str) -> str | None:
    """The mathematics of an answer, without the words around it.

    Args:
        answer: What was marked as an answer.

    Returns:
        A formula that can be compared with others; None where the answer is words, or too long.
    """
    if len(answer) > _MOST_AROUND:
        return None
    parts = [next(filter(None, found.groups())) for found in _DELIMITED.finditer(answer)]
    inner = (parts[0] if len(parts) == 1 else answer).strip(" $.,;:*")
    plain = _FUNCTIONS.sub("", _COMMAND.sub("", inner))
    # Letters in a row are a word, not a product.
    if len(inner) > _LONGEST or re.search(r"[^\W\d_]{3}", plain) or not re.search(r"[\d\\+*/^=<>]", inner):
        return None
    inner = _MIXED.sub(r"\1\\frac{\2}{\3}", inner)
    # Digits that nothing holds together are several numbers, of which a parser would read the first.
    if re.search(r"\d\s+\d", inner) or not _balanced(inner):
        return None
    return inner


def merged(answers: Sequence[str | None], formulas: Sequence[str | None]) -> list[str | None]:
    """The answers, those that are the same in mathematics spelt alike.

    Args:
        answers: As they are compared otherwise.
        formulas: The formula of each, or None where it is compared by its spelling alone.

    Returns:
        An answer for each: a number where one is among those that are the same, else the one given first.
    """
    known = {answer: answer for answer in answers if answer is not None and re.fullmatch(f"-?(?:{_NUMBER})", answer)}
    found = {said: answer for said, answer in zip(formulas, answers, strict=True) if said is not None}
    left, failed = _ALL_SECONDS, list[Exception]()
    if not found:
        return list(answers)
    for said, answer in found.items():
        if left <= 0 or len(failed) >= _MOST_FAILURES:
            break
        try:
            same, seconds = _workers.ask([said, list(known)], min(_SECONDS, left))
        except (NotStarted, Unanswered) as error:
            # No later formula is compared with one that takes too long.
            failed.append(error)
            left -= _SECONDS
            continue
        left -= seconds
        if same is None:
            known[said] = said if answer is None else answer
        else:
            found[said] = list(known.values())[same]
    if failed:
        warnings.warn(
            f"some answers are compared by their spelling alone, because their formulas take too long: {failed[0]}",
            stacklevel=2,
        )
    return [answer if said is None else found[said] for answer, said in zip(answers, formulas, strict=True)]


def _balanced(text: str) -> bool:
    depth = 0
    for sign in re.sub(r"\\[{}]", "", text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0

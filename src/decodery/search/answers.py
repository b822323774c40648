"""What a text answers: found in it, spelt in one way, and counted in votes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ..core.ask import Asking, off_loop
from ..core.sequence import Sequence as Text
from ..errors import SettingsError
from ..worker import NotStarted, Unanswered, Worker
from .base import written

Kind = Literal["auto", "number", "marked", "whole"]

_MOST_PATTERN = 1000
_SECONDS = 1.0
"""Of work that a pattern may take for all texts of a search."""
_MEMORY = 1 << 30
_THOUGHT = "</think>"
_NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_MARKER = re.compile(r"####|\\boxed\{|\b(?:final answer|answer is|answer:)", re.IGNORECASE)
_BEFORE, _AFTER = " \t\"'`*$,;:", " \t\"'`*$,;:.!?"
"""What stands around an answer and does not belong to it."""

_worker = Worker(Path(__file__).with_name("answers_child.py"), memory=_MEMORY)


@dataclass(frozen=True)
class Answers:
    """How answers are found in texts.

    kind: "number" is the last number, "marked" what stands on a line behind the last marker (####, \\boxed, "answer
    is"), "auto" the one behind a marker, or else the last number, "whole" the text itself. pattern: a regular
    expression in their place, whose last match counts, or its first group where it has one. Nothing is looked for
    before the end of a thinking part. Raises SettingsError for what is no regular expression.
    """

    kind: Kind = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "number", "marked", "whole"):
            raise SettingsError(f"an answer is auto, number, marked or whole, not {self.kind!r}")
        if len(self.pattern) > _MOST_PATTERN:
            raise SettingsError(f"a pattern of answers has at most {_MOST_PATTERN} characters, not {len(self.pattern)}")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise SettingsError(f"the pattern {self.pattern!r} is no regular expression: {error}") from error

    def of_texts(self, texts: Sequence[Text]) -> Asking[list[str | None]]:
        """`of` finished sequences; without a tokenizer a text is the ids of its tokens. Patterns run off the loop."""
        shown = [" ".join(map(str, written(seq))) if seq.text is None else seq.text.text for seq in texts]
        return (yield from off_loop(partial(self.of, shown))) if self.pattern else self.of(shown)

    def of(self, texts: Sequence[str]) -> list[str | None]:
        """The answer of each text, None where it has none. Raises SettingsError where a pattern takes too long."""
        shown = [text.rpartition(_THOUGHT)[2] for text in texts]
        if self.pattern:
            try:
                found = _worker.ask([self.pattern, shown], _SECONDS)
            except (NotStarted, Unanswered) as error:
                raise SettingsError(
                    f"the pattern {self.pattern!r} cannot be used here: {error}; simplify it"
                ) from error
        elif self.kind == "whole":
            found = shown
        else:
            found = [self._looked_for(text) for text in shown]
        return [None if each is None else canonical(each) for each in found]

    def _looked_for(self, text: str) -> str | None:
        found = None if self.kind == "number" else _marked(text)
        if self.kind == "marked":
            return found
        numbers = _NUMBER.findall(text if found is None else found)
        if found is None:
            return numbers[-1] if numbers else None
        # Of "18 dollars" the number is the answer, of "3 + 4" all of it is.
        return numbers[0] if len(numbers) == 1 else found


def canonical(answer: str) -> str | None:
    """An answer as it is compared: without case, what stands around it, and the ways of writing a number.

    None for nothing.
    """
    plain = " ".join(answer.split()).lstrip(_BEFORE).rstrip(_AFTER).casefold()
    return _same_number(plain) if _NUMBER.fullmatch(plain) else plain or None


def _same_number(digits: str) -> str:
    sign, bare = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    whole, _, fraction = bare.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    plain = f"{whole}.{fraction}" if fraction else whole
    return plain if plain == "0" else sign + plain


def _marked(text: str) -> str | None:
    """What stands behind the last marker, up to the end of its line; of a box, what is in it."""
    found = list(_MARKER.finditer(text))[-1:]
    if not found:
        return None
    rest = text[found[0].end() :]
    if not found[0][0].endswith("{"):
        return rest.lstrip(" :*").partition("\n")[0]
    depth = 1
    for place, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[:place]
    return None


@dataclass(frozen=True)
class Group:
    """Texts with the same answer. members: their numbers, in the order they were drawn; weight: of them together."""

    answer: str
    members: list[int]
    weight: float


def vote(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> list[Group]:
    """The answers, the one of most weight first; of equals the one that was given first.

    weights: of each vote, at least 0; all 1 by default. What is no answer has no vote.
    """
    members: dict[str, list[int]] = {}
    for number, answer in enumerate(answers):
        if answer is not None:
            members.setdefault(answer, []).append(number)
    groups = [
        Group(answer, numbers, math.fsum(1.0 if weights is None else weights[number] for number in numbers))
        for answer, numbers in members.items()
    ]
    # A stable sort: they stand in the order of their first members.
    return sorted(groups, key=lambda group: -group.weight)

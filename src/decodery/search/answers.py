"""What a text answers: found in it, spelt in one way, and counted in votes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from decodery.core.errors import SettingsError
from decodery.core.worker_pool import LAST, NotStarted, Unanswered, WorkerPool
from decodery.step.forward_request import ForwardCoroutine, off_loop
from decodery.step.sequence import Sequence as Text

from .base import written
from .maths import formula, merged
from .units import NUMBER, quantity_of

Kind = Literal["auto", "number", "marked", "whole", "choice", "quantity"]
Projection = Callable[[str], str | None]

_MOST_PATTERN = 1000
_SECONDS = 1.0
"""Of work that a pattern may take for all texts of a search."""
_MEMORY = 1 << 30
_THOUGHT = "</think>"
_NUMBER = re.compile(NUMBER)
_MARKER = re.compile(r"####|\\boxed\{|\b(?:final answer(?: is)?|answer is|answer:)", re.IGNORECASE)
_WRAPPING = re.compile(r"</?[a-zA-Z]+>|[*`$]+|_{2,}|\\[()\[\],;!]|\\\s")
"""Emphasis, code marks and the delimiters of formulas, which say nothing of what they stand around."""
_UNIT = r"(?:[°%€£]?\s?(?:[^\W\d_]+[²³]?(?:/[^\W\d_]+[²³]?)*)?)"
_NUMBER_ALONE = re.compile(rf"(?:^|(?<=[\s(\"'~≈–:]))[$€£¥~≈]?({_NUMBER.pattern}){_UNIT}(?=$|[\s)\"'.,;:?–-])")
_OPERATORS = re.compile(r"[\\^=+*<>|√π]|\s[-/×·÷]\s")
_MATHEMATICAL = re.compile(
    r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|root|minus|squared|cubed|negative|half|halves|thirds?|"
    r"quarters?|hundred|thousand|million|billion|trillion|dozens?)\b",
    re.IGNORECASE,
)
"""Words that make another number of the one beside them."""
_LETTERS = frozenset("cfghjklmnsvw")
"""Letters alone that are a unit, and no variable."""
_ATTACHED = frozenset(
    [
        *("am", "cm", "eur", "ft", "gb", "hr", "hrs", "kg", "km", "kwh", "lb", "lbs", "mb", "mg", "min", "mins", "ml"),
        *("mm", "mph", "oz", "pm", "sec", "secs", "usd"),
    ]
)
"""Units that may stand at the digits; other letters there are variables."""
_OPTION_FIRST = re.compile(r"^[\s:*({\[]*(?:([A-Ja-j])(?=[\s*]*(?:$|[)\]}.,:;]))|([B-H])(?![\w']))")
"""An option by itself, or before other words where it is no word of its own."""
_OPTION_BRACKETS = re.compile(r"[(\[]([A-J])[)\]]")
_OPTION_LINE = re.compile(r"^[\s*]*([A-J])(?:[.)\s*]*$|[.):]\s)", re.MULTILINE)
_OPTION_NAMED = re.compile(r"\b(?i:option|choice)(?: is)?:? ([A-J])(?![\w'])")
_AROUND_OPTION = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\s*(?=\{)|\\[()\[\]]|\$|\*\*|^\s*(?:option|choice)\b", re.IGNORECASE
)
"""Emphasis, formulas and words that stand around an option."""
_BEFORE, _AFTER = " \t\"'`*$,;:", " \t\"'`*$,;:.!?"
"""What stands around an answer and does not belong to it."""

patterns = WorkerPool(Path(__file__).with_name("pattern_worker.py"), memory=_MEMORY, nice=LAST)


@dataclass(frozen=True)
class AnswerExtractor:
    """How answers are found in texts.

    Nothing is looked for before the end of a thinking part. Marked formulas are the same answer where they are the same
    in mathematics (\\frac12 and 0.5, not \\sqrt3 and 3), by math-verify, a second of work for each at most.

    Attributes:
        kind: "number" is the last number, "marked" what stands on a line after the last marker (####, \\boxed, "answer
            is"), "auto" the one after a marker, of which a number among words stands alone, or else the last number,
            "whole" the text itself, "choice" the letter of an option, as in "(B)" or "answer: B", "quantity" the last
            number with its unit, so that 2 km and 2000 m are the same; or a function of a text, which returns what is
            compared, None for no answer.
        pattern: A regular expression in their place, whose last match counts, or its first group where it has one.

    Raises:
        SettingsError: For what is no regular expression.
    """

    kind: Kind | Projection = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        if not callable(self.kind) and self.kind not in get_args(Kind):
            raise SettingsError(f"an answer is {', '.join(get_args(Kind))} or a function, not {self.kind!r}")
        if callable(self.kind) and self.pattern:
            raise SettingsError("an answer is found by a function or by a pattern: leave one of the two out")
        if len(self.pattern) > _MOST_PATTERN:
            raise SettingsError(f"a pattern of answers has at most {_MOST_PATTERN} characters, not {len(self.pattern)}")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise SettingsError(f"the pattern {self.pattern!r} is no regular expression: {error}") from error

    def of_texts(self, texts: Sequence[Text]) -> ForwardCoroutine[list[str | None]]:
        """`of` finished sequences; without a tokenizer a text is the ids of its tokens."""
        shown = [" ".join(map(str, written(seq))) if seq.text is None else seq.text.text for seq in texts]
        # Patterns and formulas take time, which must not delay other requests.
        blocks = bool(self.pattern) or callable(self.kind) or self.kind in ("auto", "marked")
        return (yield from off_loop(partial(self.of, shown))) if blocks else self.of(shown)

    def of(self, texts: Sequence[str]) -> list[str | None]:
        """The answer of each text, None where it has none.

        Raises:
            SettingsError: If a pattern takes too long.
        """
        shown = [text.rpartition(_THOUGHT)[2] for text in texts]
        if self.pattern:
            try:
                found = patterns.ask([self.pattern, shown], _SECONDS)
            except (NotStarted, Unanswered) as error:
                raise SettingsError(
                    f"the pattern {self.pattern!r} cannot be used here: {error}; simplify it"
                ) from error
        elif callable(self.kind):
            return [_projected(self.kind, text) for text in shown]
        elif self.kind == "choice":
            return [choice_of(text) for text in shown]
        elif self.kind == "quantity":
            return [quantity_of(_marked(text) or text) for text in shown]
        elif self.kind == "whole":
            found = shown
        else:
            pairs = [self._looked_for(text) for text in shown]
            return merged([answer for answer, _ in pairs], [said for _, said in pairs])
        return [None if each is None else canonical(each) for each in found]

    def _looked_for(self, text: str) -> tuple[str | None, str | None]:
        """The answer of a text as it is compared by its spelling, and its formula where it is one."""
        found = None if self.kind == "number" else _marked(text)
        if found is None:
            numbers = [] if self.kind == "marked" else _NUMBER.findall(text)
            return canonical(numbers[-1]) if numbers else None, None
        plain = _plain(found, _AFTER.replace("!", ""))
        # Of "18 dollars" the number is the answer, of "3 + 4" and "3x" all of it is.
        number = _among_words(plain) if self.kind == "auto" else None
        said = None if number is not None or _NUMBER.fullmatch(plain) else formula(found)
        if said is not None and _NUMBER.fullmatch(said):
            return canonical(said), None
        # Letters of a formula may differ in their case alone.
        return canonical(found if number is None else number) if said is None else plain, said


def _projected(project: Projection, text: str) -> str | None:
    try:
        found = project(text)
    except Exception as error:
        raise SettingsError(
            f"the function of answers failed on {text!r:.60} ({type(error).__name__}: {error}): return None for a text "
            "without an answer"
        ) from error
    if found is not None and not isinstance(found, str):
        raise SettingsError(f"the function of answers returns a text or None, and returned {found!r:.60}")
    return found


def choice_of(text: str) -> str | None:
    """The letter of the option that a text chooses: marked, in brackets, alone on a line, or named so.

    Args:
        text: Of which the last such letter counts, marked ones first.
    """
    marked = _marked(text)
    if marked is not None:
        bare = _AROUND_OPTION.sub("", marked)
        for form in (_OPTION_FIRST, _OPTION_BRACKETS):
            if found := form.search(bare):
                return next(letter for letter in found.groups() if letter).upper()
    for form in (_OPTION_BRACKETS, _OPTION_LINE, _OPTION_NAMED):
        if letters := form.findall(text):
            return str(letters[-1]).upper()
    return None


def canonical(answer: str) -> str | None:
    """An answer as it is compared: without case, what stands around it, and the ways of writing a number.

    None for nothing.
    """
    plain = _plain(answer).casefold()
    return _same_number(plain) if _NUMBER.fullmatch(plain) else plain or None


def _plain(answer: str, after: str = _AFTER) -> str:
    """Without what stands around it."""
    return " ".join(answer.split()).lstrip(_BEFORE).rstrip(after)


def _among_words(plain: str) -> str | None:
    """The only number of an answer that consists of it, a unit and words; None of any other."""
    bare = " ".join(_WRAPPING.sub(" ", plain).split()).rstrip(_AFTER.replace("!", ""))
    found = _NUMBER_ALONE.search(bare)
    if found is None or len(_NUMBER.findall(bare)) != 1 or _OPERATORS.search(bare) or _MATHEMATICAL.search(bare):
        return None
    attached = re.match(r"[^\W\d_]+", bare[found.end(1) :])
    if attached and attached[0].casefold() not in _ATTACHED:
        return None
    # A letter alone is a variable, but for units, and for an article among words.
    words = {word.casefold() for word in re.findall(r"[^\W\d_]+", bare)}
    alone = {word for word in words if len(word) == 1} - _LETTERS
    return found[1] if not alone or (alone == {"a"} and any(len(word) > 1 for word in words)) else None


def _same_number(digits: str) -> str:
    sign, bare = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    whole, _, fraction = bare.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    plain = f"{whole}.{fraction}" if fraction else whole
    return plain if plain == "0" else sign + plain


def _marked(text: str) -> str | None:
    """What stands after the last marker, up to the end of its line; of a box, what is in it."""
    found = list(_MARKER.finditer(text))[-1:]
    if not found:
        return None
    rest = text[found[0].end() :]
    if not found[0][0].endswith("{"):
        # What ends a sentence is no factorial.
        return rest.lstrip(" :*").partition("\n")[0].rstrip(_AFTER)
    depth = 1
    for place, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[:place]
    return None


@dataclass(frozen=True)
class AnswerGroup:
    """Texts with the same answer.

    Attributes:
        members: Their numbers, in the order they were drawn.
        weight: Of them together.
    """

    answer: str
    members: list[int]
    weight: float


def vote(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> list[AnswerGroup]:
    """The answers, the one of most weight first; of equals the one that was given first.

    What is no answer has no vote.

    Args:
        weights: Of each vote, at least 0; all 1 by default.
    """
    members: dict[str, list[int]] = {}
    for number, answer in enumerate(answers):
        if answer is not None:
            members.setdefault(answer, []).append(number)
    groups = [
        AnswerGroup(answer, numbers, math.fsum(1.0 if weights is None else weights[number] for number in numbers))
        for answer, numbers in members.items()
    ]
    # A stable sort: they stand in the order of their first members.
    return sorted(groups, key=lambda group: -group.weight)

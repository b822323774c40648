"""Regular expressions as JSON Schema has them (ECMA-262, unicode mode), read once and for every engine alike.

Engines differ in what `.`, `\\d`, `[a--b]`, `\\Z` or `(?x)` mean. So a pattern is parsed here into sets of characters,
sequences, alternatives, repetitions and anchors, and engines get those, spelled so that no dialect matters. What is no
regular language, or not certain to mean one thing, is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from decodery.core.errors import ConstraintError

from .code_points import ANY, DIGIT, LAST, SPACE, WORD, Ranges, any_case, code_points, complement, union

_DEEPEST = 100
_MOST_REPEATS = 100_000


@dataclass(frozen=True)
class Chars:
    """One character out of these."""

    ranges: Ranges


@dataclass(frozen=True)
class Property:
    """One character with, or without, a Unicode property, as in \\p{Letter}."""

    text: str


@dataclass(frozen=True)
class Concatenation:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """At least `least` and at most `most` times; None: without end."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    """The beginning or the end of the text."""

    begin: bool


Node = Chars | Property | Concatenation | Alternatives | Repeat | Anchor


_CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


@lru_cache(maxsize=256)
def parse(text: str, *, whole: bool = False) -> Node:
    """The pattern as a tree.

    Args:
        whole: It is to match from end to end, so anchors there say nothing and are dropped.

    Raises:
        ConstraintError: With the place for what is malformed or no regular language.
    """
    node = _Parser(text).pattern()
    return _without_outer_anchors(node, text) if whole else node


def _without_outer_anchors(node: Node, text: str) -> Node:
    if isinstance(node, Alternatives):
        return Alternatives(tuple(_without_outer_anchors(option, text) for option in node.options))
    parts = list(node.parts) if isinstance(node, Concatenation) else [node]
    while parts and parts[0] == Anchor(True):
        del parts[0]
    while parts and parts[-1] == Anchor(False):
        del parts[-1]
    inner: list[Node] = list(parts)
    while inner:
        each = inner.pop()
        if isinstance(each, Anchor):
            raise ConstraintError(f"the pattern {text!r} has ^ or $ in its middle: leave them out, or put them outside")
        inner += (
            each.parts if isinstance(each, Concatenation) else each.options if isinstance(each, Alternatives) else ()
        )
        inner += (each.node,) if isinstance(each, Repeat) else ()
    return Concatenation(tuple(parts))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.any_case = False

    def pattern(self) -> Node:
        self.any_case = self.take("(?i)")
        node = self.alternatives()
        if self.at < len(self.text):
            self.refuse("a ) that closes nothing")
        return node

    def refuse(self, what: str) -> NoReturn:
        raise ConstraintError(f"the pattern {self.text[:200]!r} has {what} at character {self.at}")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) * found
        return found

    def match(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def alternatives(self) -> Node:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            parts.append(self.repeated())
        return Concatenation(tuple(parts))

    def repeated(self) -> Node:
        node = self.atom()
        if found := self.match(r"([*+?])\??|\{(\d{1,9})(,(\d{0,9}))?\}\??"):
            sign, least, several, most = found.groups()
            low = {"*": 0, "+": 1, "?": 0}[sign] if sign else int(least)
            high = {"*": None, "+": None, "?": 1}[sign] if sign else low if not several else int(most) if most else None
            if isinstance(node, Anchor) or (high is not None and high < low) or max(low, high or 0) > _MOST_REPEATS:
                self.refuse("an impossible repetition")
            if self.match(r"[*+?]|\{\d"):
                self.refuse("a repetition of a repetition")
            node = Repeat(node, low, high)
        return node

    def atom(self) -> Node:
        if self.take("^"):
            return Anchor(True)
        if self.take("$"):
            return Anchor(False)
        if self.take("."):
            return Chars(ANY)
        if self.take("["):
            return Chars(self.char_class())
        if self.take("("):
            return self.group()
        if found := self.match(r"\\[pP]\{[\w=]+\}"):
            if self.any_case:
                self.refuse("a Unicode property where case does not count")
            return Property(found[0])
        if self.take("\\"):
            return Chars(self.cased(self.escape(in_class=False)))
        if self.match(r"[*+?]|\{\d"):
            self.refuse("nothing to repeat")
        if self.match(r"(?=\{,\d+\})"):
            # Python repeats here, older JavaScript means the characters.
            self.refuse("a repetition without its least, which is to be given: write {0,n}, or \\{ for a brace")
        self.at += 1
        return Chars(self.cased(code_points(self.text[self.at - 1])))

    def cased(self, ranges: Ranges) -> Ranges:
        """A character in any case where case does not count; a class such as \\w stays what it is."""
        (low, high), *others = ranges
        return any_case(low, high) if self.any_case and low == high and not others else ranges

    def group(self) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            self.refuse(f"more than {_DEEPEST} groups in each other")
        if self.match(r"\?(=|!|<=|<!)"):
            self.refuse("look-around, which is not supported")
        outside = self.any_case
        if self.take("?i:"):
            self.any_case = True
        elif self.peek("?") and not self.match(r"\?(:|P?<\w+>)"):
            self.refuse("a flag other than (?i) at its beginning, or an unknown kind of group,")
        node = self.alternatives()
        self.any_case = outside
        if not self.take(")"):
            self.refuse("a group that is not closed")
        self.depth -= 1
        return node

    def char_class(self) -> Ranges:
        negated = self.take("^")
        found: list[Ranges] = []
        while not self.take("]"):
            low = self.member()
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.member()
                single = len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]
                if not single or low[0][0] > high[0][0]:
                    self.refuse("an impossible range")
                first, last = low[0][0], high[0][0]
                found.append(any_case(first, last) if self.any_case else ((first, last),))
            else:
                found.append(self.cased(low))
        ranges = union(*found)
        return complement(ranges) if negated else complement(complement(ranges))

    def member(self) -> Ranges:
        if self.at >= len(self.text):
            self.refuse("a [ that is not closed")
        if self.take("\\"):
            return self.escape(in_class=True)
        self.at += 1
        return code_points(self.text[self.at - 1])

    def escape(self, *, in_class: bool) -> Ranges:
        if found := self.match(r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"):
            high, low = int(found[1], 16), int(found[2], 16)
            code = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)
        elif found := self.match(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}"):
            code = int(found[1] or found[2] or found[3], 16)
        elif found := self.match(r"c([A-Za-z])"):
            code = ord(found[1]) % 32
        elif found := self.match(r"0(?!\d)"):
            code = 0
        elif found := self.match(r"[dwsDWS]"):
            ranges = _CLASSES[found[0].lower()]
            return complement(ranges) if found[0].isupper() else ranges
        elif found := self.match(r"[tnvfr]"):
            code = _CONTROLS[found[0]]
        elif in_class and self.take("b"):
            code = 8
        elif found := self.match(r"[bB]"):
            self.refuse("a word boundary, which is not supported")
        elif found := self.match(r"[1-9k]"):
            self.refuse("a back-reference, which is not supported")
        elif found := self.match(r"[^0-9A-Za-z]"):
            code = ord(found[0])
        else:
            self.refuse("an unknown escape")
        if code > LAST:
            self.refuse("a character beyond Unicode")
        return ((code, code),)


def printed(node: Node) -> str:
    """The pattern spelled for the engine; anchors are ^ and $."""
    if isinstance(node, Chars):
        return _printed_ranges(node.ranges)
    if isinstance(node, Property):
        return node.text
    if isinstance(node, Anchor):
        return "^" if node.begin else "$"
    if isinstance(node, Concatenation):
        return "".join(
            f"(?:{printed(part)})" if isinstance(part, Alternatives) else printed(part) for part in node.parts
        )
    if isinstance(node, Alternatives):
        return "|".join(printed(option) for option in node.options)
    most = "" if node.most is None else node.most
    return f"(?:{printed(node.node)}){{{node.least},{most}}}"


def _printed_ranges(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    if not ranges:
        return "[^\\u{0}-\\u{10FFFF}]"
    return "[" + "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges) + "]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:X}}}"

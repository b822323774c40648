"""A simple and slow reference implementation of regular expressions as constraints, to verify fast engines."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from decodery.constraints.code_points import Ranges, union
from decodery.constraints.pattern import Alternatives, Chars, Concatenation, Node, Repeat, parse
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

NOTHING = Chars(())


@dataclass(frozen=True)
class RegexState:
    """State of `ReferenceRegex`.

    Attributes:
        rest: The pattern of the remaining text.
        tail: Bytes of an incomplete character.
        ended: Whether an end token was written.
    """

    rest: Node
    tail: bytes = b""
    ended: bool = False


class ReferenceRegex(Constraint):
    """A regular expression, matched by derivatives: the pattern of the rest after each character.

    Every token of the vocabulary is tried, byte by byte. Source: Derivatives of Regular Expressions (1964).
    """

    def __init__(self, pattern: str, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._pattern = parse(pattern, whole=True)

    def init(self, prompt: Ordered[int]) -> RegexState:
        return RegexState(self._pattern)

    def allowed(self, state: RegexState) -> np.ndarray:
        return np.array([self._allows(state, token) for token in range(self.vocabulary.size)])

    def advance(self, state: RegexState, token: int) -> RegexState:
        if token in self.vocabulary.eos_ids:
            return RegexState(state.rest if self.is_complete(state) else NOTHING, ended=True)
        piece = b"\xff" if token in self.vocabulary.special_ids else self.vocabulary.pieces[token]
        rest, tail = state.rest, state.tail
        for byte in piece:
            tail += bytes([byte])
            try:
                rest, tail = derivative(rest, ord(tail.decode())), b""
            except UnicodeDecodeError:
                if not _continues(rest, tail):
                    return RegexState(NOTHING)
        return RegexState(rest, tail)

    def is_complete(self, state: RegexState) -> bool:
        return not state.tail and nullable(state.rest)

    def _allows(self, state: RegexState, token: int) -> bool:
        if token in self.vocabulary.eos_ids:
            return self.is_complete(state)
        if state.ended or not self.vocabulary.pieces[token]:
            return False
        return possible(self.advance(state, token).rest)


def nullable(node: Node) -> bool:
    """Whether the empty text matches."""
    if isinstance(node, Concatenation):
        return all(nullable(part) for part in node.parts)
    if isinstance(node, Alternatives):
        return any(nullable(option) for option in node.options)
    return isinstance(node, Repeat) and (node.least == 0 or nullable(node.node))


def possible(node: Node) -> bool:
    """Whether any text matches."""
    if isinstance(node, Concatenation):
        return all(possible(part) for part in node.parts)
    if isinstance(node, Alternatives):
        return any(possible(option) for option in node.options)
    if isinstance(node, Repeat):
        return node.least == 0 or possible(node.node)
    return node != NOTHING


def derivative(node: Node, code: int) -> Node:
    """The pattern of the remaining text after the character `code`."""
    if isinstance(node, Chars):
        return Concatenation(()) if any(low <= code <= high for low, high in node.ranges) else NOTHING
    if isinstance(node, Alternatives):
        options = {each: None for option in node.options if possible(each := derivative(option, code))}
        return Alternatives(tuple(options)) if options else NOTHING
    if isinstance(node, Repeat):
        if node.most == 0:
            return NOTHING
        least, most = max(0, node.least - 1), None if node.most is None else node.most - 1
        return _joined(derivative(node.node, code), (Repeat(node.node, least, most),))
    assert isinstance(node, Concatenation), "properties and anchors have no derivative here"
    options = {}
    for at, part in enumerate(node.parts):
        after = _joined(derivative(part, code), node.parts[at + 1 :])
        if possible(after):
            options[after] = None
        if not nullable(part):
            break
    return Alternatives(tuple(options)) if options else NOTHING


def _joined(first: Node, rest: tuple[Node, ...]) -> Node:
    if not possible(first):
        return NOTHING
    parts = (*first.parts, *rest) if isinstance(first, Concatenation) else (first, *rest)
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def first_characters(node: Node) -> Ranges:
    """The characters a matching text may begin with."""
    if isinstance(node, Chars):
        return node.ranges
    if isinstance(node, Alternatives):
        return union(*(first_characters(option) for option in node.options))
    if isinstance(node, Repeat):
        return first_characters(node.node) if node.most != 0 else ()
    assert isinstance(node, Concatenation)
    found: list[Ranges] = []
    for part in node.parts:
        found.append(first_characters(part))
        if not nullable(part):
            break
    return union(*found)


def _continues(node: Node, tail: bytes) -> bool:
    """Whether some character whose UTF-8 form begins with `tail` may come next."""
    length = 2 if 0xC2 <= tail[0] < 0xE0 else 3 if 0xE0 <= tail[0] < 0xF0 else 4 if 0xF0 <= tail[0] < 0xF5 else 0
    if len(tail) >= length or any(not 0x80 <= byte < 0xC0 for byte in tail[1:]):
        return False
    code = tail[0] & (0x7F >> length)
    for byte in tail[1:]:
        code = code << 6 | byte & 0x3F
    free = 6 * (length - len(tail))
    low, high = code << free, (code + 1) << free
    # Longer forms of shorter characters, and surrogates, are no UTF-8; the ranges hold no surrogates.
    low = max(low, {2: 0x80, 3: 0x800, 4: 0x10000}[length])
    return any(first < high and low <= last for first, last in first_characters(node))

"""The shortest completions of what a grammar has begun, against the lengths of languages that are known."""

from __future__ import annotations

from typing import Any

import pytest

from decodery.constraints import Choice, Grammar, JSONSchema, Regex
from decodery.constraints.shortest import BYTES, QUICK, THOROUGH, Effort, shortest
from decodery.diffusion.closing import Closing
from decodery.models.tokenizers.vocabulary import Vocabulary

PIECES = [*(letter.encode() for letter in "abcdxy"), b"cccc", b"ab", b"", b""]
WORDS = Vocabulary(PIECES, frozenset({8, 9}), (8,), lambda text: [*map("abcdxy".find, text.strip("\x02"))])

LENGTHS: list[tuple[Any, dict[str, int]]] = [
    (Regex("a*(b|c{40}d)"), {"": 1, "aaa": 1, "c": 40, "ac": 40, "b": 0, "c" * 40: 1}),
    (Regex("x([ab]{40}d)|y([ab]{2}d)"), {"": 4, "x": 41, "y": 3, "yab": 1}),
    (Regex("([abc][xy]){20}d?"), {"": 40, "axb": 37}),
    (Grammar('start: "a" start "b" | "c" "d"*'), {"": 1, "aaaa": 5, "aaaac": 4, "aacddb": 1}),
    (JSONSchema({"type": "string", "minLength": 9}), {"": 11, '"abc': 7}),
    (JSONSchema({"type": "array", "minItems": 3, "items": {"type": "integer"}}), {"": 7, "[1,": 4, "[1,2,3,4": 1}),
]  # fmt: skip


@pytest.mark.parametrize("language", range(len(LENGTHS)))
def test_a_thorough_search_finds_a_shortest_text_and_a_quick_one_a_text(language: int) -> None:
    description, lengths = LENGTHS[language]
    grammar = description.compile(BYTES)
    for text, length in lengths.items():
        found = {effort: shortest(grammar, text.encode(), effort) for effort in (QUICK, THOROUGH)}
        assert found[THOROUGH] is not None and len(found[THOROUGH]) == length, (text, found)
        for each in found.values():
            state = grammar.init([])
            for byte in text.encode() + (each or b""):
                state = grammar.advance(state, byte)
            assert each is None or grammar.is_complete(state)
            assert each is None or length <= len(each) <= 2 * length + 2


def test_what_is_not_found_in_the_steps_there_are_is_not_made_up() -> None:
    grammar = Regex("[ab]{9}").compile(BYTES)
    assert shortest(grammar, b"", Effort(2, 4, 4, False)) is None
    assert shortest(grammar, b"ab" * 4, Effort(2, 4, 4, False)) in (b"a", b"b")


def test_completions_are_tokens_that_may_come_and_as_few_as_fit() -> None:
    strict = Choice(("abab", "dddd"), mode="strict")
    for description, text, room in (
        (Regex("a*(b|c{40}d)", mode="strict"), "c", 13), (Regex("a*(b|c{40}d)"), "", 1), (strict, "", 2),
        (Choice(("abab", "dddd")), "d", 3), (Regex("(ab){3}x", mode="strict"), "", 4),
    ):  # fmt: skip
        constraint: Any = description.compile(WORDS)
        state = constraint.init([])
        for token in WORDS.encode(text):
            state = constraint.advance(state, token)
        closing = Closing(constraint, WORDS, [8, 9])
        assert closing.find(state, room - 1, thorough=True) is None
        found = closing.find(state, room)
        assert found is not None and len(found) == room
        for token in found:
            assert constraint.accepts(state, token)
            state = constraint.advance(state, token)
        assert constraint.is_complete(state) and closing.find(state, 0) == []

"""Programs before and after a fix, read or built in, and which of their tokens make the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.errors import PromptError
from decodery.models.tokenizers.tokenizer import Tokenizer

from .built_in import built_in_data
from .lines import named_texts, read_objects

MOST_TOKENS = 1024
"""Longer programs are left out, as published."""


@dataclass(frozen=True)
class ProgramPair:
    """One program before and after a fix."""

    before: str
    after: str


@dataclass(frozen=True, eq=False)
class LabelledProgram:
    """One side of a pair."""

    tokens: np.ndarray
    changed: np.ndarray  # [n] bool, the tokens that make the difference
    control: int  # 0 for a program after its fix, 1 before it


def read_pairs(path: Path) -> list[ProgramPair]:
    """The pairs of a JSON Lines file: objects with the texts "before" and "after", which differ."""

    def read(entry: dict[str, Any]) -> ProgramPair | None:
        found = named_texts(entry, "before", "after")
        return ProgramPair(*found) if found and found[0] != found[1] else None

    return read_objects(path, '{"before": text, "after": another text}', read)


def built_in_pairs(count: int) -> list[ProgramPair]:
    """The first `count` of 200 pairs of programs before and after a security fix, made of templates.

    Every template is about one thing, then about the next one. Of a program about $noun, `@` is what the fix changes.
    """
    made = [
        ProgramPair(*(each["program"].replace("@", each[side]).replace("$noun", noun) for side in ("before", "after")))
        for noun in built_in_data("things of programs")
        for each in built_in_data("fixes")
    ]
    return made[:count]


def changed_characters(before: str, after: str) -> tuple[np.ndarray, np.ndarray]:
    """What a fix changes, at the published level "mix": [len(before)] and [len(after)] bool.

    Before it: the whole of every line that was deleted or rewritten. After it: the characters that were added.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    deleted, added = np.zeros(len(before), dtype=bool), np.zeros(len(after), dtype=bool)
    for what, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "equal":
            continue
        start, first = (len("".join(lines[:n])) for lines, n in ((old, i), (new, k)))
        was, now = "".join(old[i:j]), "".join(new[k:m])
        deleted[start : start + len(was)] = True
        # Within rewritten lines alone, so that no character is matched with one of another place.
        for kind, _, _, begin, end in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
            added[first + begin : first + end] |= kind != "equal"
    return deleted, added


def tokens_of(tokenizer: Tokenizer, text: str, marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n] of a text, and which tokens hold any character of `marked` [len(text)] bool."""
    ids = tokenizer.encode(text)
    pieces = [b"" if id in tokenizer.special_ids else tokenizer.piece(id) for id in ids]
    spelled, meant = b"".join(pieces), text.encode()
    # Some tokenizers put a space before a text.
    ahead = len(spelled) - len(meant)
    if ahead < 0 or spelled[ahead:] != meant:
        raise PromptError(f"the tokenizer changes the text {text[:40]!r}, so its tokens cannot be distinguished")
    sizes = [len(character.encode()) for character in text]
    counts = np.cumsum(np.concatenate((np.zeros(ahead + 1, dtype=np.int64), np.repeat(marked, sizes))))
    ends = np.cumsum([len(piece) for piece in pieces])
    begins = np.concatenate(([0], ends[:-1]))
    return np.array(ids, dtype=np.int64), counts[ends] > counts[begins]


def programs_of(tokenizer: Tokenizer, pairs: Sequence[ProgramPair]) -> list[LabelledProgram]:
    """Both sides of every pair, but those that are too long, or in which nothing or everything is changed."""
    found = []
    for pair in pairs:
        deleted, added = changed_characters(pair.before, pair.after)
        for control, text, marked in ((0, pair.after, added), (1, pair.before, deleted)):
            tokens, changed = tokens_of(tokenizer, text, marked)
            # The first token is never predicted.
            if len(tokens) <= MOST_TOKENS and changed[1:].any() and not changed[1:].all():
                found.append(LabelledProgram(tokens, changed, control))
    return found

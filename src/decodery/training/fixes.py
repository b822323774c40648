"""Small programs before and after a security fix, made of templates: what SVEN's prefixes learn from by default."""

from __future__ import annotations

from .built_in import built_in_data
from .programs import ProgramPair


def built_in_pairs(count: int) -> list[ProgramPair]:
    """The first `count` of 200 pairs: every template about one thing, then about the next one.

    Of a program about $noun, `@` is what the fix changes.
    """
    made = [
        ProgramPair(*(each["program"].replace("@", each[side]).replace("$noun", noun) for side in ("before", "after")))
        for noun in built_in_data("things of programs")
        for each in built_in_data("fixes")
    ]
    return made[:count]

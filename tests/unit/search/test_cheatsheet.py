"""`cheatsheet` remembers strategies between problems, and two writers lose nothing."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from decodery.core.errors import CorruptFile
from decodery.search import (
    Cheatsheet,
)
from decodery.search.memory_file import Sheet, SheetFile, unless_changed
from scripted_lm import Asked, ScriptedLLM
from serving import tiny_lm


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_lm(max_positions=4096)


def _curator(asked: Asked) -> str:
    if "whole new cheatsheet" in asked.text:
        seen = re.findall(r"item \d+", asked.text)
        return f"<cheatsheet>{' '.join(seen)} item {asked.number}</cheatsheet>"
    return f"answer {asked.number}"


def test_a_cheatsheet_knows_the_past_and_nothing_else(tmp_path: Path) -> None:
    for mode in ("cumulative", "synthesis", "retrieval", "history", "empty"):
        file, lm = str(tmp_path / f"{mode}.json"), ScriptedLLM(_curator)
        for number, question in enumerate(("red apple", "blue sea", "red rose", "green sea")):
            before = len(lm.asked)
            lm.search(question, Cheatsheet(file, mode=mode, k=1), max_new_tokens=50)
            asked = lm.asked[before:]
            assert len(asked) == (2 if mode in ("cumulative", "synthesis") else 1)
            later = (
                {"red apple", "blue sea", "red rose", "green sea"}
                - {question}
                - {e[0] for e in SheetFile(file).read().entries}
            )
            assert not any(word in each.text for each in asked for word in later)
            shown = next(each.text for each in asked if "whole new" not in each.text)
            if mode == "retrieval" and number == 3:
                assert "blue sea" in shown and "red" not in shown
            if mode == "history":
                assert shown.count("Question:\n") == number
        sheet = SheetFile(file).read()
        assert sheet.version == 4 and sheet.entries[0][0] == "red apple"
        # The curator may write twice as much as the answer.
        assert {each.max_tokens for each in lm.asked} <= {50, 100}
        assert SheetFile(file).read() == sheet and json.loads(Path(file).read_text())["version"] == 4
    # Without tags the memory stays, and one that is too long is cut at a line.
    for said, memory in (("no tags", "(empty)"), ("<cheatsheet>aaaa\nbbbb\ncccc</cheatsheet>", "aaaa")):
        file = str(tmp_path / f"{len(said)}.json")
        ScriptedLLM(["x", said]).search("q", Cheatsheet(file, most=8))
        assert SheetFile(file).read().memory == memory


def test_a_strategy_once_found_is_used_from_then_on(tmp_path: Path) -> None:
    """What is found with probability q at each question is known at question i with 1 - (1 - q)^i, and not with q."""
    q, streams, questions = 0.25, 30, 4

    def script(asked: Asked) -> str:
        if "whole new" in asked.text:
            return "<cheatsheet>the trick</cheatsheet>" if "the trick" in asked.text else "<cheatsheet></cheatsheet>"
        luck = random.Random(asked.seed).random() < q
        return "by the trick" if luck or "the trick" in asked.text else "by guessing"

    lm, knows = ScriptedLLM(script), [0] * questions
    for stream in range(streams):
        search = Cheatsheet(str(tmp_path / f"{stream}.json"))
        for number in range(questions):
            (out,) = lm.search(f"question {number}", search, seed=stream * questions + number, max_new_tokens=9)
            knows[number] += out.text == "by the trick"

    def off(law: list[float]) -> float:
        return max(
            abs(seen / streams - share) / (share * (1 - share) / streams) ** 0.5
            for seen, share in zip(knows, law, strict=True)
        )

    # Without a memory each question would have its own luck alone.
    assert off([1 - (1 - q) ** (number + 1) for number in range(questions)]) < 3.5 < off([q] * questions)


def test_a_cheatsheet_loses_nothing_where_two_write(tmp_path: Path) -> None:
    file = str(tmp_path / "memory.json")
    lm = ScriptedLLM(_curator)

    def meanwhile(asked: Asked) -> str:
        if asked.number == 0:
            lm.search("the other", Cheatsheet(file))
        return _curator(asked)

    first = ScriptedLLM(meanwhile)
    (found,) = first.search("the first", Cheatsheet(file))
    sheet = SheetFile(file).read()
    assert found.trace.ledger.counts["conflicts"] == 1 and len(first.asked) == 3
    assert [question for question, _ in sheet.entries] == ["the other", "the first"]
    # What the other one noted was in front of the curator when it wrote again.
    assert sheet.memory == "item 1 item 2"
    # A blind write would have lost it, and is not done.
    assert SheetFile(file).change(unless_changed(Sheet(), Sheet(9))).version == 2 and SheetFile(file).read() == sheet
    whole = Path(file).read_text()
    for damaged in (whole[: len(whole) // 2], "[]", '{"format": "x"}', "[" * 10000):
        Path(file).write_text(damaged)
        with pytest.raises(CorruptFile, match="name another file"):
            lm.search("q", Cheatsheet(file))
        assert Path(file).read_text() == damaged

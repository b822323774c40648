"""Searches whose prompts grow until the model's context has no room for the next one: what they found until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decodery.core.errors import ContextFull
from decodery.scorers import LLMJudge, TextScore
from decodery.search import (
    IAD,
    AdaptiveSampling,
    Archon,
    BestOfN,
    Cheatsheet,
    Documents,
    IterDRAG,
    Revisions,
    WeightedVote,
)
from decodery.search.memory_file import SheetFile
from scripted_lm import Asked, ScriptedLLM

SECOND = TextScore(lambda text: float(text.split()[1]))
FIRST = r"^(\w+)"


def wordy(first: str, score: float, words: int) -> str:
    return f"{first} {score} " + " ".join(["so"] * (words - 2))


def test_iad_returns_the_best_so_far() -> None:
    texts = [wordy("one", 0.3, 10), wordy("two", 0.6, 10), wordy("three", 0.9, 40), wordy("four", 0.1, 40)]
    lm = ScriptedLLM(texts, context=90)
    with pytest.warns(UserWarning, match="found before: the prompt has"):
        best, *others = lm.search("Why?", IAD(SECOND, n=2, rounds=3), temperature=1.0)
    # The third round would show 80 words of earlier texts.
    assert best.text.startswith("three") and best.score == 0.9 and len(others) == 3 and len(lm.asked) == 4
    assert not best.complete and best.trace.ledger.counts["rounds"] == 2
    # With room for it, it goes on; and a first prompt that does not fit is an error, for nothing stands.
    assert len((long := ScriptedLLM([*texts, *texts])).search("Why?", IAD(SECOND, n=2, rounds=2))) == 6
    assert len(long.asked) == 6
    with pytest.raises(ContextFull, match="the model's context 90"):
        lm.search("why " * 90, IAD(SECOND, n=2))


def test_chains_of_revisions_end_one_by_one_and_all_vote() -> None:
    # One chain of long texts and two of short ones, in the order they are asked for.
    texts = [wordy("one", 0.9, 60), "two 0.5", "two 0.5", "six 0.6", "six 0.6", "six 0.7", "six 0.7"]
    lm = ScriptedLLM(texts, context=70)
    best, *others = lm.search("Why?", Revisions(SECOND, n=3, length=3, pattern=FIRST))
    counts = best.trace.ledger.counts
    assert (counts["outgrown"], counts["attempts"], len(lm.asked)) == (1, 7, 7) and not best.complete
    # Of each chain one answer: six 0.7 twice, and the long chain's one 0.9. What stood first was the long one.
    assert [each.text.split()[0] for each in (best, *others)] == ["six", "one"]
    assert best.score == pytest.approx(1.4 / 2.3)
    whole = ScriptedLLM([*texts[:3], *["two 0.5"] * 6]).search("Why?", Revisions(SECOND, n=3, length=3, pattern=FIRST))
    assert whole[0].complete and "outgrown" not in whole[0].trace.ledger.counts


def test_archon_returns_the_candidates_of_the_layer_before() -> None:
    layers = "archon:layers=generator(n=2)/ranker(top_k=2)/fuser"
    for words, asked in ((60, 2), (8, 4)):

        def script(request: Asked, words: int = words) -> str:
            return "[2] > [1]" if "numbers in brackets" in request.text else wordy(f"t{request.number}", 0.5, words)

        lm = ScriptedLLM(script, context=100)
        if words == 8:
            assert lm.search("Why?", layers)[0].complete
        else:
            with pytest.warns(UserWarning, match="found before"):
                found = lm.search("Why?", layers)
            assert [each.text.split()[0] for each in found] == ["t0", "t1"] and not found[0].complete
        assert len(lm.asked) == asked
    assert Archon().cost() == 7


def test_a_cheatsheet_is_shown_as_far_as_it_leaves_room_and_nothing_is_lost(tmp_path: Path) -> None:
    file = str(tmp_path / "history.json")
    for number in range(6):
        lm = ScriptedLLM(lambda asked: wordy("so", 1.0, 10), context=80)
        (found,) = lm.search(f"question {number}", Cheatsheet(file, mode="history"), max_new_tokens=20)
        assert found.complete
    (asked,) = lm.asked
    shown = [number for number in range(5) if f"question {number}" in asked.text]
    # The last ones, whole, and no more than fit beside an answer of 20 words.
    assert shown == [2, 3, 4] and found.trace.ledger.counts["memory_cut"] == 1 and "Question:\nquestion 2" in asked.text
    assert len(SheetFile(file).read().entries) == 6
    # No room to rewrite the memory: it stays, and so does what was asked and answered.
    file = str(tmp_path / "memory.json")

    def curator(asked: Asked) -> str:
        return "<cheatsheet>an item</cheatsheet>" if "whole new cheatsheet" in asked.text else "yes"

    ScriptedLLM(curator).search("why?", Cheatsheet(file))
    (found,) = ScriptedLLM(curator, context=60).search("how?", Cheatsheet(file), max_new_tokens=20)
    sheet = SheetFile(file).read()
    assert found.text == "yes" and found.complete and found.trace.ledger.counts["outgrown"] == 1
    assert sheet.memory == "an item" and [question for question, _ in sheet.entries] == ["why?", "how?"]


def test_iter_drag_leaves_out_what_came_first_and_then_returns_what_it_knows() -> None:
    documents = Documents(tuple(" ".join([f"{name}-fact", *["is"] * 18]) for name in ("red", "blue", "green")))
    lines = ["Follow up: blue-fact", "Intermediate answer: sea", "So the final answer is: deep"]
    lm = ScriptedLLM(lines, context=100)
    (found,) = lm.search("red-fact", IterDRAG(documents, k=1), max_new_tokens=16)
    assert found.text == "deep" and found.complete and "outgrown" not in found.trace.ledger.counts
    lm = ScriptedLLM(lines, context=70)
    (found,) = lm.search("red-fact", IterDRAG(documents, k=1), max_new_tokens=16)
    assert found.text == "deep" and found.trace.ledger.counts["outgrown"] == 1
    assert "red-fact is" not in lm.asked[1].text and "blue-fact is" in lm.asked[1].text
    # Lines alone outgrow the context: the last intermediate answer is what is known.
    long = ["Follow up: blue-fact", "Intermediate answer: " + " ".join(["sea"] * 30)]
    lm = ScriptedLLM(long * 2, context=60)
    with pytest.warns(UserWarning, match="found before"):
        (found,) = lm.search("red-fact", IterDRAG(documents, k=1), max_new_tokens=40)
    assert found.text.startswith("sea sea") and not found.complete


@pytest.mark.parametrize("search", [BestOfN, WeightedVote, AdaptiveSampling, IAD])
def test_texts_that_are_too_long_to_be_judged_are_returned_unjudged(search: Any) -> None:
    lm = ScriptedLLM(lambda asked: wordy(f"t{asked.number}", 0.5, 50), context=60)
    with pytest.warns(UserWarning, match="not judged|found before"):
        found = lm.search("Why?", search(LLMJudge(), n=2), temperature=1.0)
    assert found[0].text.startswith("t0") and not found[0].complete
    # Those that can be judged are, and the others left out.
    lm = ScriptedLLM(lambda asked: "5" if asked.number > 1 else wordy("t", 0.5, (50, 5)[asked.number]), context=60)
    if search is BestOfN:
        with pytest.warns(UserWarning, match="1 of 2 texts are left out"):
            (found,) = lm.search("Why?", search(LLMJudge(), n=2), temperature=1.0)
        assert len(found.text.split()) == 5 and found.complete

"""Sequential revisions: what later attempts are shown, and who is elected."""

from __future__ import annotations

import re

import pytest

from decodery.core.errors import SettingsError
from decodery.scorers import TextScore
from decodery.search import IAD, Revisions, WeightedVote
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.scorers import PuzzleExamples
from scripted_lm import Asked, Said, ScriptedLLM

SECOND = TextScore(lambda text: float(text.split()[-1]))
"""A text is its answer and, after it, what it is worth."""
FIRST = r"^(\w+)"


def said(texts: list[str]) -> ScriptedLLM:
    return ScriptedLLM([Said(text) for text in texts])


def test_one_attempt_a_chain_is_a_weighted_vote() -> None:
    texts = ["one 0.2", "two 0.5", "one 0.4", "three 0.3"]
    chains = said(texts).search("q", Revisions(SECOND, n=4, length=1, pattern=FIRST))
    vote = said(texts).search("q", WeightedVote(SECOND, n=4, pattern=FIRST))
    assert [(each.text, each.score) for each in chains] == [(each.text, each.score) for each in vote]
    assert chains[0].text == "one 0.4"


def test_chains_elect_their_own_answers_before_all_vote() -> None:
    # In the order they are asked for: first attempts of three chains, then second ones.
    texts = ["one 0.9", "two 0.3", "two 0.3", "six 1.0", "one 0.25", "one 0.25"]
    best, other = said(texts).search("q", Revisions(SECOND, n=3, length=2, pattern=FIRST))
    assert (best.text, other.text) == ("six 1.0", "two 0.3") and best.score == pytest.approx(1 / 1.6)
    # A vote of all would have elected another one.
    flat = said(texts).search("q", WeightedVote(SECOND, n=6, pattern=FIRST))
    assert flat[0].text == "one 0.9"
    assert best.trace.ledger.counts["attempts"] == 6


def test_an_attempt_is_shown_the_last_ones_of_its_chain_and_what_is_remarked_on_them() -> None:
    asked = puzzle("prog:attempts=4")
    prompt, wrong = "1>3;4>6;5>7|", ["dup.", "neg.", "push1.", "push2.", "drop.", "push4.", "push2 add.", "push3 add."]
    lm = said(wrong)
    # A script has no tokens of its prompts.
    scorer = PuzzleExamples(asked, decode=lambda tokens: prompt)
    search = Revisions(scorer, n=2, length=4, window=2, shown="{attempt}{remark}|", ask="", answer="whole")
    best = lm.search(prompt, search, apply_chat_template=False)[0]
    assert best.text == "push2 add." and asked.verify(prompt, best.text)
    shown = [f"{text}{asked.remark(prompt, text)}|" for text in wrong]
    wanted = [prompt, prompt, *(prompt + each for each in shown[:2])]
    wanted += [prompt + shown[chain] + shown[chain + 2] for chain in (0, 1)]
    # A window of two: the first attempts are not shown any more.
    wanted += [prompt + shown[chain + 2] + shown[chain + 4] for chain in (0, 1)]
    assert [each.prompt for each in lm.asked] == wanted
    # They are prompts that a model learns from, and no two attempts share a seed.
    assert all(asked.verify(each, "push2 add.") for each in wanted) and len({each.seed for each in lm.asked}) == 8


def test_iad_shows_attempts_in_the_form_a_model_has_learned() -> None:
    asked = puzzle("prog:attempts=4")
    prompt = "1>3;4>6;5>7|"
    texts = ["dup.", "push6.", "push2 sub.", "neg.", "push2 add.", "push1."]
    scorer = PuzzleExamples(asked, decode=lambda tokens: prompt)
    for feedback in ("best-worst", "best"):
        lm = said(texts)
        found = lm.search(
            prompt, IAD(scorer, n=2, rounds=4, feedback=feedback, shown="{attempt}{remark}|"), apply_chat_template=False
        )  # type: ignore[arg-type]
        assert found[0].text == "push2 add."
        # push6 is right once of three times, so that it is the best one; equal ones keep the order they came in.
        worst, best = "dup.!1>3 got 1|", "push6.!1>3 got 6|"
        second = prompt + (worst if feedback == "best-worst" else "") + best
        assert [each.prompt for each in lm.asked[:3]] == [prompt, prompt, second]
        shown = [each.prompt for each in lm.asked if each.prompt != prompt]
        assert all(asked.verify(each, "push2 add.") for each in shown)
    with pytest.raises(SettingsError, match="attempts alone"):
        IAD(scorer, feedback="score", shown="{attempt}|")
    with pytest.raises(SettingsError, match=r"write \{attempt\}"):
        IAD(scorer, shown="again")


def test_what_is_cut_off_is_told_and_the_rest_found() -> None:
    lm = ScriptedLLM([Said("one 0.5"), Said("two 0.6"), Said("three", gone=True), Said("four 1.0")])
    with pytest.warns(UserWarning, match="found before"):
        found = lm.search("q", Revisions(SECOND, n=2, length=2, pattern=FIRST))
    assert found[0].text == "one 0.5" and not any(each.complete for each in found)


def test_chats_keep_what_went_before_their_question() -> None:
    lm = ScriptedLLM(lambda asked: Said(f"{asked.number} 1.0"))
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    lm.search(turns, Revisions(SECOND, n=1, length=2, answer="whole"))
    second: Asked = lm.asked[1]
    assert second.text.startswith("system: be brief\nuser: why?\n\nAn earlier attempt") and "0 1.0" in second.text


@pytest.mark.parametrize(
    ("settings", "said"), [({"length": 0}, "length of at least 1"), ({"shown": "again:"}, "write {attempt}")]
)
def test_what_makes_no_chain_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        Revisions(SECOND, **settings)  # type: ignore[arg-type]


def test_iad_shows_what_is_remarked_on_the_best_program_and_nothing_that_is_hidden() -> None:
    asked, prompt = puzzle("prog"), "1>3;4>6;5>7|"
    lm = said(["dup add.", "neg.", "push2 add.", "neg."])
    search = IAD(PuzzleExamples(asked, decode=lambda tokens: prompt), n=2, rounds=1)
    assert lm.search(prompt, search, apply_chat_template=False, temperature=1.0)[0].text == "push2 add."
    assert "What is wrong with it: !1>3 got 2" in lm.asked[2].text
    hidden = [x for x in range(10) if x not in (1, 4, 5)]
    assert not any(f"{x}>{x + 2}" in each.text for each in lm.asked for x in hidden)

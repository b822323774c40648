"""Answers are found where they stand, compared as they are meant, and counted; no pattern takes more than its time."""

from __future__ import annotations

import random
import threading
from collections import Counter
from functools import partial
from itertools import product
from math import comb
from time import perf_counter, process_time
from typing import Any

import pytest

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.search import SelfConsistency
from decodery.search.answers import AnswerExtractor, canonical, vote
from decodery.search.features import TextFeatures, features, standardised
from decodery.step.forward_request import off_loop
from decodery.testing import TableModel
from scripted_lm import ScriptedLLM


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("So 3 + 4 = 7. The answer is $1,234.50.", "1234.5"),
        ("The answer is 18 dollars. I am 100% sure.", "the answer is 18 dollars. i am 100% sure"),
        ("<think>#### 5</think> It is 6", "6"),
        (r"Thus \boxed{\frac{1}{2}} holds.", r"\frac{1}{2}"),
        (r"\boxed{3", "3"),
        ("first #### 4 and then #### 5", "5"),
        ("Final answer: **Paris**", "paris"),
        ("16-3=13", "13"),
        ("it is -4", "-4"),
        ("about .50", "0.5"),
        ("nothing here", None),
        ("", None),
    ],
)
def test_the_answer_is_where_a_reader_finds_it(text: str, answer: str | None) -> None:
    (found,) = AnswerExtractor().of([text])
    # What stands after a marker goes to the end of its line.
    assert found == (answer.removeprefix("the answer is ") if answer else answer)


def test_other_places_are_for_who_names_them() -> None:
    text = "I have 3 cats.\nThe answer is 3 cats"
    assert AnswerExtractor("number").of([text]) == ["3"]
    assert AnswerExtractor("marked").of([text, "3"]) == ["3 cats", None]
    assert AnswerExtractor("whole").of([text, "  \n"]) == ["i have 3 cats. the answer is 3 cats", None]
    assert AnswerExtractor(pattern=r"have (\w+)").of([text, "no"]) == ["3", None]
    assert AnswerExtractor(pattern=r"[a-z]+").of([text]) == ["cats"]
    assert canonical(" $007.10. ") == "7.1" and canonical("-0") == "0" and canonical("1,000") == "1000"


@pytest.mark.integration
def test_patterns_that_never_end_are_ended() -> None:
    begin = perf_counter()
    with pytest.raises(SettingsError, match=r"takes more than 1 s; simplify it"):
        AnswerExtractor(pattern="(a+)+$").of(["a" * 64 + "b"])
    assert perf_counter() - begin < 30
    # The next one is served as ever, and texts cannot make the usual ways slow.
    assert AnswerExtractor(pattern="b+").of(["abb"]) == ["bb"]
    begin = perf_counter()
    for kind in ("auto", "number", "marked", "whole"):
        AnswerExtractor(kind).of(
            ["9" * 200_000, "1," * 100_000, r"\boxed{" * 20_000, "-" * 200_000, "answer is " * 20_000]
        )
    assert perf_counter() - begin < 5


def test_slow_patterns_of_one_caller_do_not_delay_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodery.search.answers._SECONDS", 0.3)
    engine, quick, begin = Engine(TableModel(3)), AnswerExtractor(pattern="b+"), threading.Event()

    def slow() -> None:
        begin.set()
        with pytest.raises(SettingsError, match="simplify it"):
            AnswerExtractor(pattern="((.|\\n)+)+éé").of(["a" * 64])

    slow_ones = [engine.enter(off_loop(slow), owner="one") for _ in range(5)]
    engine.step()
    assert begin.wait(60)
    for _ in range(3):
        other = engine.enter(off_loop(partial(quick.of, ["abb"])), owner="other")
        engine.run([other])
        assert other.result == ["bb"]
    # Each of the slow ones takes its time, and one at a time.
    assert sum(each.finished for each in slow_ones) <= 3
    engine.run(slow_ones)


def test_what_is_no_pattern_is_named() -> None:
    for settings, message in (
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": "a" * 1001}, "at most 1000"),
        ({"kind": "last"}, "auto, number, marked, whole, choice, quantity or a function"),
    ):
        with pytest.raises(SettingsError, match=message):
            AnswerExtractor(**settings)


def test_votes_are_counted_and_ties_go_to_the_answer_given_first() -> None:
    assert [(group.answer, group.members) for group in vote(["b", None, "a", "a", "b", None])] == [
        ("b", [0, 4]),
        ("a", [2, 3]),
    ]
    assert vote([None, None]) == []
    assert [group.answer for group in vote(["a", "b", "b"], [1.0, 0.4, 0.5])] == ["a", "b"]
    chance = random.Random(0)
    for _ in range(1000):
        answers = [chance.choice(["a", "b", "c", None]) for _ in range(9)]
        plain, weighted = vote(answers), vote(answers, [0.3] * 9)
        assert [group.members for group in plain] == [group.members for group in weighted]
        if plain:
            most = max(Counter(each for each in answers if each).values())
            assert plain[0].weight == most == len(plain[0].members)


def boxed(*answers: str) -> list[str]:
    return [f"So it is \\boxed{{{answer}}}." for answer in answers]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "0.5"),
        ("1 1/2", "1.5"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("(1,2)", r"\left(1, 2\right)"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("x = 5", "5"),
        (r"18\text{ dollars}", "a total of 18 dollars"),
        (r"\$18", "18"),
        ("3 + 4", "7"),
        ("3!", "6"),
        (r"\sqrt{3}", r"$\sqrt3$ meters"),
        ("50%", "50"),
    ],
)
def test_marked_answers_are_the_same_however_they_are_spelt(one: str, other: str) -> None:
    for pair in ((one, other), (other, one)):
        first, second = AnswerExtractor().of(boxed(*pair))
        assert first == second is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\sqrt{3}", "3"),
        (r"\sqrt3", "3"),
        (r"3\pi", "3"),
        ("3 pi", "3"),
        ("3x", "3"),
        ("3 a", "3"),
        ("3!", "3"),
        ("3^{100}", "3"),
        ("3 million", "3"),
        ("x < 3", "3"),
        ("1 1/2", "1"),
        ("1 000", "1"),
        ("1/3", "0.333"),
        ("3 + 4", "8"),
        ("[1,2]", "(1,2)"),
        ("(1,2)", "(2,1)"),
        ("cat", "act"),
        ("2ab", "2ac"),
        (r"\$3 and \$4", "3"),
    ],
)
def test_marked_answers_that_differ_are_not_counted_together(one: str, other: str) -> None:
    for pair in ((one, other), (other, one)):
        first, second = AnswerExtractor().of(boxed(*pair))
        assert first != second and None not in (first, second)


def test_roots_do_not_vote_for_what_is_under_them() -> None:
    answers = AnswerExtractor().of(boxed(r"\sqrt{3}", r"3\pi", "7", "3x", "7", "3"))
    assert vote(answers)[0].members == [2, 4]
    answers = AnswerExtractor().of(boxed("7", r"\frac{1}{2}", "0.5", r"\frac{2}{4}", "7"))
    assert vote(answers)[0] == vote([None, "0.5", "0.5", "0.5"])[0]
    # Texts that end one after the other are compared as well.
    lm = ScriptedLLM([*boxed(r"\frac{1}{2}", "0.5", "7"), *boxed("7")])
    found = lm.search("?", "first-finish:n=3,k=3,answer=auto", temperature=1.0)
    assert sorted(out.score for out in found) == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.integration
def test_a_formula_that_nobody_can_compute_is_compared_by_its_spelling() -> None:
    with pytest.warns(UserWarning, match="compared by their spelling alone.* it takes more than 1 s"):
        found = AnswerExtractor().of(boxed("9^{9^{9^9}}", "3x", "3 x", "9^{9^{9^9}}", "x" * 300 + "+1"))
    assert found[0] == found[3] != found[1] == found[2] and found[4] == "x" * 300 + "+1"
    begin = process_time()
    hostile = ("\\(" * 50_000, "$" * 99_999, "{" * 999, "a " * 50_000, "1 " * 50_000 + "x", "\\frac" * 100)
    assert (
        len(AnswerExtractor().of([f"#### {each}" for each in hostile])) == len(hostile) and process_time() - begin < 5
    )


@pytest.mark.parametrize("n", [1, 3, 5, 7])
def test_a_majority_of_two_answers_follows_the_binomial_tail(n: int) -> None:
    def right(choose) -> float:
        return sum(
            0.6 ** pool.count("r") * 0.4 ** pool.count("w") for pool in product("rw", repeat=n) if choose(pool) == "r"
        )

    tail = sum(comb(n, k) * 0.6**k * 0.4 ** (n - k) for k in range(n // 2 + 1, n + 1))
    assert right(lambda pool: vote(pool)[0].answer) == pytest.approx(tail)
    # The first answer alone, which is wrong on purpose, is caught.
    assert n == 1 or right(lambda pool: pool[0]) != pytest.approx(tail)


def test_features_count_planted_markers_whatever_stands_beside() -> None:
    text = "Wait, maybe so. HMM, perhaps! Therefore it is not sure; await mightily. Let me check."
    told = features(text, 100)
    assert told == TextFeatures(100.0, 30.0, 30.0, 20.0)
    pool = [told, features("Thus 4.", 10), features("Thus 4.", 40)]
    rows = standardised(pool)
    assert rows.mean(axis=0) == pytest.approx([0] * 4, abs=1e-12) and rows.std(axis=0) == pytest.approx([1] * 4)
    assert standardised(pool[::-1])[::-1] == pytest.approx(rows)
    assert not standardised([told, told]).any() and not standardised([told]).any()


@pytest.mark.parametrize(
    "said",
    [
        "**18** dollars", "`18` items", "__18__ eggs", "<b>18</b>", "~18", "18 dollars/day", "18 m/s", "18 °C",
        "18 times", "18km", "approximately 18.0 meters", "$18$ in all. I hope it is correct",
    ],
)  # fmt: skip
def test_a_number_in_ordinary_phrases_is_the_number(said: str) -> None:
    assert AnswerExtractor().of([f"The answer is {said}."]) == ["18"]


@pytest.mark.parametrize("said", ["3x", "3 pi", "3 million", "minus 3", "x = 3", "3!", "3^2", "1/3", "3 y"])
def test_a_number_that_is_a_part_of_mathematics_is_not(said: str) -> None:
    assert AnswerExtractor().of(["\\boxed{" + said + "}"]) != ["3"]


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("choice", "(A) is wrong, so the answer is (C).", "C"),
        ("choice", r"So \boxed{b}", "B"),
        ("choice", "Answer: D) 12", "D"),
        ("choice", "A. no\n**E**", "E"),
        ("choice", "A cat sat on (B) the mat", "B"),
        ("choice", "I have a cat", None),
        ("choice", r"So \boxed{\text{C}}", "C"),
        ("choice", r"So $\boxed{\textbf{(E)}\ 12}$.", "E"),
        ("choice", "The answer is option B.", "B"),
        ("choice", "The answer is **B**: it floats.", "B"),
        ("choice", r"Final answer: \( D \)", "D"),
        ("choice", "I would take option C here", "C"),
        ("choice", "I made a choice", None),
        ("quantity", "It is 2 km", "2000 m"),
        ("quantity", "so 2,000 metres of 3", "2000 m"),
        ("quantity", "it takes 1.5 hours.", "5400 s"),
        ("quantity", "$12.50", "12.5 $"),
        ("quantity", "50 cents", "0.5 $"),
        ("quantity", "25 %", "0.25"),
        ("quantity", "90 km/h", "25 m/s"),
        ("quantity", "there are 7 apples", "7"),
        ("quantity", "none", None),
        ("quantity", "15kWh", "15"),
        ("quantity", "the 20th", "20"),
        ("quantity", "5 in total", "5"),
        ("quantity", r"So \boxed{5 \text{ km}}.", "5000 m"),
        ("quantity", r"that is $5\,\mathrm{km}$ away", "5000 m"),
        ("quantity", "1 hour and 30 minutes", "5400 s"),
        ("quantity", "30 minutes or 1 hour", "3600 s"),
        ("quantity", "5 feet 6 inches", "1.6764 m"),
        ("quantity", "2 km or 5 m", "5 m"),
        ("quantity", "$2.5 million", "2500000 $"),
        ("quantity", "it is $5 and $6", "6 $"),
        ("quantity", r"it is \$5", "5 $"),
        ("quantity", "3 1/2 hours", "12600 s"),
        ("quantity", r"\frac{1}{2} hour", "1800 s"),
        ("quantity", "60 km / 2 hours = 30 km per hour", "8.33333333 m/s"),
        ("quantity", "50000 cm^2", "5 m²"),
        ("quantity", "7 m/s²", "7"),
        ("choice", "The answer is a bit hard.", None),
        ("choice", "The answer is B because of C", "B"),
    ],
)
def test_options_and_quantities_are_compared_as_such(kind: Any, text: str, answer: str | None) -> None:
    assert AnswerExtractor(kind).of([text]) == [answer]


def test_a_function_says_what_the_answer_is() -> None:
    lm = ScriptedLLM(["x=1", "y=2", "x=3"])
    search = SelfConsistency(n=3, answer=lambda text: text[0] if "=" in text else None)
    assert [out.text for out in lm.search("q", search, temperature=1.0)] == ["x=1", "y=2"]
    with pytest.raises(SettingsError, match=r"failed on 'q' \(IndexError"):
        AnswerExtractor(lambda text: text[5]).of(["q"])
    with pytest.raises(SettingsError, match="returns a text or None, and returned 1"):
        AnswerExtractor(len).of(["q"])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="leave one of the two out"):
        AnswerExtractor(str, "a")

"""Puzzles: what is drawn can be solved, what is solved is right, and what is wrong is found out."""

from __future__ import annotations

import itertools
from fractions import Fraction
from itertools import islice
from random import Random

import pytest

from decodery.core.errors import SettingsError
from decodery_benchmarks.puzzles import PUZZLES, SPLITS, drawn, puzzle
from decodery_benchmarks.puzzles.alphabet import ALPHABET, END_ID, VOCABULARY, encoded, tokenizer
from decodery_benchmarks.puzzles.base import END, split_of
from decodery_benchmarks.puzzles.countdown import solvable

EVERY = [
    *PUZZLES,
    "chain:operations=12,modulus=23",
    "countdown:numbers=3",
    "prog:longest=3,attempts=2",
    "kvhop:facts=100,hops=3",
]


@pytest.mark.parametrize("spec", EVERY)
def test_solutions_are_right_beginnings_of_them_open_and_prompts_apart_by_split(spec: str) -> None:
    asked, random = puzzle(spec), Random(1)
    assert puzzle(asked.spec) == asked
    seen = {split: list(islice(drawn(asked, split), 40)) for split in SPLITS}
    assert seen["train"] == list(islice(drawn(asked, "train"), 40)) != list(islice(drawn(asked, "train", 1), 40))
    prompts = [prompt for several in seen.values() for prompt in several]
    assert len(set(prompts)) == len(prompts)
    assert all(split_of(prompt) == split for split, several in seen.items() for prompt in several)
    right = 0
    for prompt in seen["train"]:
        text = asked.solve(prompt, random)
        assert set(prompt + text) <= set(ALPHABET) and len(text) + 1 <= asked.length
        assert "".join(asked.steps(text)) == text
        if asked.verify(prompt, text):
            right += 1
            assert all(asked.labels(prompt, text)) and all(asked.open(prompt, text[:at]) for at in range(len(text) + 1))
    # Some of the texts with slips are wrong on purpose.
    assert right == len(seen["train"]) or (spec == "retry-chain" and right > 20)


def test_one_token_is_one_character_and_few_are_enough() -> None:
    spoken = tokenizer()
    assert VOCABULARY == len(set(ALPHABET)) + 1 <= 64 and spoken.vocab_size == VOCABULARY
    assert (
        spoken.encode(ALPHABET) == encoded(ALPHABET) == list(range(END_ID))
        and spoken.decode(encoded(ALPHABET)) == ALPHABET
    )
    assert spoken.encode(f"1{END}") == [1, END_ID] and spoken.decode([1, END_ID]) == "1" and spoken.eos_ids == (END_ID,)


@pytest.mark.parametrize(
    ("spec", "prompt", "text", "right", "labels"),
    [
        ("chain", "7+3*2-5%10=", "7+3=0;0*2=0;0-5=5;#5", True, [True] * 4),
        ("chain", "7+3*2-5%10=", "7+3=1;1*2=2;2-5=7;#7", False, [False] * 4),
        # Two errors that make up for each other.
        ("chain", "7+3*2-5%10=", "7+3=5;5*2=0;0-5=5;#5", False, [False] * 4),
        ("chain", "7+3*2-5%10=", "7+3=0;0*2=0;0-5=5;#5#", False, [True, True, True, False]),
        ("direct-chain", "7+3*2-5%10=", "#5", True, [True]),
        ("direct-chain", "7+3*2-5%10=", "7+3=1;1*2=2;2-5=7;#5", True, [True] * 4),
        ("direct-chain", "7+3*2-5%10=", "#55", False, [False]),
        ("direct-chain", "7+3*2-5%10=", "5", False, [False]),
        ("retry-chain", "7*3+1%10=", "7*3=2!7*3=1;1+1=2;#2", True, [True, True, True]),
        ("retry-chain", "7*3+1%10=", "7*3=2;2+1=3;#3", False, [False, False, False]),
        ("countdown", "3 5 6 9>24=", "9-5=4 left 3 4 6;6-3=3 left 3 4;4*3=12 left 12;#24", False, [False] * 4),
        ("countdown", "3 5 6 9>24=", "9-5=4 left 3 4 6;6*4=24 left 3 24;24*3=72 left 72;#72", False, [False] * 4),
        # A legal step can be a dead end: 3, 4 and 6 do not make 24 as above, 1 and 24 do.
        ("countdown", "1 2 3 4>24=", "4*3=12 left 1 2 12;24-1=23 left 23;", False, [True, False]),
        ("countdown", "3 5 6 9>24=", "9-5=4 left 3 4 5;", False, [False]),
        ("countdown", "3 5 6 9>24=", "9-4=5 left 3 5 6;", False, [False]),
        ("countdown", "3 5 6 9>24=", "#24", False, [False]),
        ("prog", "1>3;4>6;5>7|", "push2 add.", True, [True, True]),
        # The other way about it is right, too, and so is what wastes opcodes.
        ("prog", "1>3;4>6;5>7|dup add.!1>3 got 2|", "push1 add push1 add.", True, [True] * 4),
        ("prog", "0>0;1>1;2>4|", "dup mul.", True, [True, True]),
        ("prog", "1>3;4>6;5>7|", "add push2.", False, [False, False]),
        ("prog", "1>3;4>6;5>7|", "push2 add", False, [True, False]),
        ("prog", "1>3;4>6;5>7|", "push2 swap drop drop drop push3.", False, [True, True, False, False, False, False]),
        ("kvhop", "cd=ef;xy=cd;ab=cd;ab>2=", "ab=cd;cd=ef;#ef", True, [True] * 3),
        ("kvhop", "cd=ef;xy=cd;ab=cd;ab>2=", "ab=cd;#cd", False, [True, False]),
        ("kvhop", "cd=ef;xy=cd;ab=cd;ab>2=", "xy=cd;cd=ef;#ef", False, [False] * 3),
        ("dyck", "8:([=", "])", True, [True]),
        ("dyck", "8:([=", ")]", False, [False]),
        ("dyck", "4:([=", "()])", False, [False]),
    ],
)  # fmt: skip
def test_verifiers_tell_right_from_wrong(spec: str, prompt: str, text: str, right: bool, labels: list[bool]) -> None:
    asked = puzzle(spec)
    assert asked.verify(prompt, text) is right and asked.labels(prompt, text) == labels


def test_what_can_be_reached_is_what_every_order_of_every_operation_reaches() -> None:
    def brute(numbers: tuple[Fraction, ...]) -> set[Fraction]:
        if len(numbers) == 1:
            return set(numbers)
        found = set()
        for a, b, *rest in itertools.permutations(numbers):
            results = [a + b, a * b, *([a - b] if a >= b else []), *([a / b] if b and (a / b).denominator == 1 else [])]
            for result in results:
                found |= brute((*rest, result))
        return found

    random = Random(3)
    for _ in range(20):
        numbers = tuple(sorted(random.randint(1, 13) for _ in range(3)))
        within = brute(tuple(map(Fraction, numbers)))
        assert {target for target in range(1, 31) if solvable(numbers, target)} == {
            int(each) for each in within if 1 <= each <= 30
        }


def test_examples_tell_how_much_of_a_program_is_right_and_what_is_wrong_first() -> None:
    asked = puzzle("prog")
    prompt, text = "0>1;1>2;2>3|", "push1 add."
    assert asked.verify(prompt, text) and asked.passed(prompt, text) == 1 and asked.remark(prompt, text) == ""
    for wrong, passed, remark in [
        ("dup add.", 1 / 3, "!0>1 got 0"),
        ("add.", 0.0, "!0>1 got none"),
        ("push1", 0.0, "!0>1 got none"),
        # The square of x - 1, which is 1 at 0 and 2.
        ("push1 sub dup mul.", 1 / 3, "!1>2 got 0"),
    ]:
        assert not asked.verify(prompt, wrong)
        assert asked.passed(prompt, wrong) == pytest.approx(passed) and asked.remark(prompt, wrong) == remark
    # The square is what 0 and 1 alone would not tell from the input itself.
    assert asked.verify("0>0;1>1;2>2|", "dup.") and not asked.verify("0>0;1>1;2>2|", "dup mul.")


def test_attempts_in_prompts_are_wrong_and_say_how() -> None:
    asked = puzzle("prog:longest=3,attempts=2")
    prompts = list(islice(drawn(asked, "train"), 60))
    counts = {prompt.count("got") for prompt in prompts}
    assert counts == {0, 1, 2}
    for prompt in prompts:
        shown, *attempts = prompt[:-1].split("|")
        for attempt in attempts:
            text, remark = attempt.split("!")
            assert asked.remark(f"{shown}|", text) == f"!{remark}" and not asked.verify(prompt, text)


def test_retractions_tell_of_errors() -> None:
    """The correlation that methods which look at lengths live on: without it they could not be told apart."""
    asked, random = puzzle("retry-chain"), Random(0)
    texts = [(prompt, asked.solve(prompt, random)) for prompt in islice(drawn(asked, "train"), 600)]
    marks = {
        right: [text.count("!") for prompt, text in texts if asked.verify(prompt, text) is right]
        for right in (True, False)
    }
    assert sum(marks[False]) / len(marks[False]) > 1.5 * sum(marks[True]) / len(marks[True])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: puzzle("chess"), "no puzzle 'chess'"),
        (lambda: puzzle("chain:operations=0"), "at least one operation"),
        (lambda: puzzle("chain:rounds=3"), "no setting 'rounds'"),
        (lambda: puzzle("countdown:numbers=9"), "2 to 5 numbers"),
        (lambda: puzzle("chain").verify("1+1", "#2"), "no prompt of chain"),
        (lambda: puzzle("prog:longest=9"), "1 to 6 opcodes"),
        (lambda: puzzle("prog").verify("1>3|", "add."), "no prompt of prog"),
        (lambda: puzzle("prog:longest=2").solve("1>3;4>60;5>777|", Random(0)), "no one shortest program"),
        (lambda: puzzle("kvhop:hops=9,facts=3"), "as many facts"),
        (lambda: puzzle("kvhop").verify("ab=cd;", "#cd"), "no prompt of kvhop"),
        (lambda: puzzle("kvhop").verify("ab=cd;ab>2=", "#cd"), "do not lead so far"),
        (lambda: next(drawn(puzzle("chain"), "exam")), "no split 'exam'"),
        (lambda: list(drawn(puzzle("chain:operations=1,modulus=2"), "test")), "has only"),
    ],
)
def test_what_is_no_puzzle_is_refused(make, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make()

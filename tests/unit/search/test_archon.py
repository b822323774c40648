"""`archon`: the cost of its layers, its components, and components that are other models."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

import decodery as dc
from decodery.core.errors import ContextFull, SettingsError
from decodery.search import (
    Archon,
    archon_layers,
)
from decodery.search.archon_verdicts import ranking
from scripted_lm import Asked, ScriptedLLM
from scripted_server import scripted
from scripted_server import stream as replied
from serving import tiny_lm


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_lm(max_positions=4096)


def _archon(asked: Asked) -> str:
    if "numbers in brackets" in asked.text:
        return "[2] > [1] > [9] > [2]"
    if "number in brackets" in asked.text:
        return "\n".join(f"[{n}] note {n}" for n in range(1, 1 + len(re.findall(r"^\[\d+\]", asked.text, re.M))))
    if "[Correct] or [Incorrect]" in asked.text:
        return "[Incorrect]" if "odd" in asked.text else "[Correct]"
    if "Give the reasoning" in asked.text:
        return "because"
    if "numbered list" in asked.text:
        return "1. It is short.\n2. It is true."
    if "[Passed] or [Failed]" in asked.text:
        return f"Unit Test #1: [Passed]\nUnit Test #2: [{'Passed' if 'odd' in asked.text else 'Failed'}]"
    return f"{'odd' if asked.number % 2 else 'even'}-{asked.number}"


def test_archon_asks_as_often_as_its_layers_cost() -> None:
    draw = random.Random(0)
    for _ in range(25):
        layers = [":".join(f"generator(n={draw.randint(1, 3)})" for _ in range(draw.randint(1, 2)))]
        for _ in range(draw.randint(0, 3)):
            layers += draw.choice(
                [
                    ["critic", "ranker(top_k=2)"],
                    ["fuser(n=2)"],
                    ["unit-tests", "evaluator(top_k=3)"],
                    ["critic", "fuser"],
                ]
            )
        search = Archon(tuple(tuple(layer.split(":")) for layer in layers))
        lm = ScriptedLLM(_archon)
        found = lm.search("Why?", search, temperature=0.7)
        assert len(lm.asked) == search.cost(), layers
        ledger = found[0].trace.ledger
        written = sum("generator" in name or "fuser" in name for name in layers)
        assert ledger.counts.get("judge_calls", 0) <= len(lm.asked) - written


def test_archons_components() -> None:
    def asked(layers: str) -> tuple[list[str], ScriptedLLM]:
        lm = ScriptedLLM(_archon)
        return [out.text for out in lm.search("Why?", f"archon:layers={layers}", temperature=0.7)], lm

    assert ranking("none\n[2] > [9] > [2]", 3) == [1, 0, 2] and ranking("", 2) is None
    assert asked("generator(n=3)/ranker(top_k=3)")[0] == ["odd-1", "even-0", "even-2"]
    # Critiques stay with the candidates that a ranker moves.
    assert (
        "[1] odd-1\nCritique: note 2\n\n[2] even-0\nCritique: note 1"
        in asked("generator(n=3)/critic/ranker/fuser")[1].asked[-1].text
    )
    # A verdict of incorrect is not read as correct; where none passes all stay.
    assert asked("generator(n=3)/verifier")[0] == ["even-0", "even-2"]
    assert len(asked("generator(n=1)/verifier")[0]) == 1
    assert asked("generator(n=2)/unit-tests/evaluator(top_k=1)")[0] == ["odd-1"]
    # A critic whose notes do not match is asked again, at another seed.
    answers = ["a", "b", "[1] only one", "[1] x\n[2] y", "fused"]
    lm = ScriptedLLM(answers)
    assert lm.search("Why?", "archon:layers=generator(n=2)/critic/fuser", temperature=0.7)[0].text == "fused"
    assert lm.asked[2].text == lm.asked[3].text and lm.asked[2].seed != lm.asked[3].seed
    for layers, rule in (
        ("fuser", "first layer"),
        ("generator/generator", "first layer"),
        ("generator/critic", "right before a ranker"),
        ("generator/ranker:fuser", "alone in its layer"),
        ("generator/evaluator", "right after unit-tests"),
        ("generator/unit-tests/ranker", "right before an evaluator"),
        ("generator(n=5000)", "at most"),
        ("oracle", "no component"),
    ):
        with pytest.raises(SettingsError, match=rule):
            asked(layers)


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ("Here are the 3 answers ranked:\n[2] > [1] > [3]", [1, 0, 2]),
        ("Answer: [3] > [2]\nbecause [3] is short", [2, 1, 0]),
        ("**[3] > [1] > [2]**", [2, 0, 1]),
        ("I first thought [1] > [2], but [2] > [1].", [1, 0, 2]),
        ("Answer: [2]", [1, 0, 2]),
        ("The best of the 3 is 2.", None),
        ("[1] is better than [2]", None),
    ],
)
def test_a_ranking_is_read_in_brackets_alone(said: str, order: list[int] | None) -> None:
    assert ranking(said, 3) == order


def _archons(layers: str, *said: str) -> tuple[list[str], ScriptedLLM]:
    """What a pipeline over the candidates "a" and "b" leaves, where the model says these texts of them, in turn."""
    lm = ScriptedLLM(["a", "b", *said])
    return [out.text for out in lm.search("Why?", f"archon:layers=generator(n=2)/{layers}", temperature=0.7)], lm


def test_what_judges_say_in_other_words_is_asked_for_again() -> None:
    # A denial is no verdict, nor are both; the others stand meanwhile.
    found, lm = _archons("verifier", "why a", "why b", "This is not correct.", "[Correct]", "[Incorrect]")
    assert found == ["b"] and lm.asked[4].text == lm.asked[6].text and lm.asked[4].seed != lm.asked[6].seed
    found, _ = _archons("verifier", "?", "?", "[Correct]", "[Correct] or [Incorrect]?", "**[incorrect]**")
    assert found == ["a"]
    found, _ = _archons("verifier", "?", "?", "<think>[Incorrect]</think>[Correct]", "[Incorrect]")
    assert found == ["a"]
    # So it is with tests, all of which must be judged.
    tests = "1. It is short.\n2. It is true."
    found, _ = _archons(
        "unit-tests/evaluator",
        tests,
        "1. Not passed\n2. Not passed",
        "Test 1: [Failed]\nTest 2: [Passed]",
        "Unit Test #1: [Failed]\n**Unit Test #2**: [Failed]",
    )
    assert found == ["b", "a"]
    # Critiques may be marked bold.
    _, lm = _archons("critic/fuser", "**[1]** wrong\n**[2]** right", "c")
    assert len(lm.asked) == 4 and "a\nCritique: wrong" in lm.asked[-1].text
    # What never comes changes nothing, after 10 questions.
    found, lm = _archons("ranker", *["the second"] * 10)
    assert found == ["a", "b"] and len(lm.asked) == 12
    found, lm = _archons("verifier", "?", "?", *["yes"] * 20)
    assert found == ["a", "b"] and len(lm.asked) == 24


def test_components_of_archon_may_be_other_servers() -> None:
    last = json.dumps(
        {
            "choices": [{"delta": {}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        }
    )
    told = [replied(text, last=f"data: {last}\n\ndata: [DONE]\n\n") for text in ("yours", "[2] > [1]")]
    with (
        scripted(replied("mine"), replied("fused of both")) as (first, asked),
        scripted(*told, models=("small", "large")) as (second, there),
    ):
        lm = dc.remote(first)
        layers = f"generator:generator(model={second}#large)/ranker(top_k=1,model={second}#large)/fuser"
        (out,) = lm.search("Who?", f"archon:layers={layers}", temperature=0.5)
    assert out.text == "fused of both" and [body["model"] for body in there] == ["large", "large"]
    # The ranker of the second server is shown what both wrote, and the fuser of the first one what was kept.
    assert "[1] mine" in there[1]["messages"][0]["content"] and "[2] yours" in there[1]["messages"][0]["content"]
    assert "yours" in asked[1]["messages"][0]["content"] and "mine" not in asked[1]["messages"][0]["content"]
    assert len({body["seed"] for body in (asked[0], there[0])}) == 2
    assert out.trace.ledger.passes == {"second": 2} and out.trace.ledger.rows == {"second": 14}


def test_components_of_archon_may_be_other_local_models(lm: Any, monkeypatch: Any) -> None:
    other = tiny_lm(max_positions=4096, seed=8)
    monkeypatch.setattr(archon_layers, "second_model", lambda model, dtype, target: other.model)
    settings = {"temperature": 0.0, "max_new_tokens": 6}
    found = lm.search("Why?", Archon((("generator", "generator(model=other)"),)), **settings)
    assert [out.tokens for out in found] == [each.generate("Why?", **settings).tokens for each in (lm, other)]
    assert found[0].tokens != found[1].tokens
    short = tiny_lm(max_positions=24, seed=8)
    monkeypatch.setattr(archon_layers, "second_model", lambda model, dtype, target: short.model)
    with pytest.raises(ContextFull, match="more than the 24"):
        lm.search("Why? " * 9, Archon((("generator(model=other)",),)), **settings)

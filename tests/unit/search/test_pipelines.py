"""Searches that ask after prompts of their own: what they ask, what they keep, and what they spend."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import decodery as dc
from decodery.core.conversation import Conversation
from decodery.core.errors import ContextFull, CorruptFile, ServerError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import silent
from decodery.scorers import LLMJudge, TextScore
from decodery.search import (
    DRAG,
    IAD,
    Archon,
    BestOfN,
    Cheatsheet,
    Documents,
    IterDRAG,
    Pairwise,
    SelfRefine,
    WeightedVote,
    archon_layers,
)
from decodery.search.archon_verdicts import ranking
from decodery.search.drag import Demonstration
from decodery.search.memory_file import Sheet, SheetFile, unless_changed
from decodery.step.forward_request import gather
from decodery.testing import tiny_transformer
from methods import PIPELINES
from scripted_lm import Asked, Said, ScriptedLLM
from scripted_server import scripted
from scripted_server import stream as replied
from serving import tiny_lm

LAST = TextScore(lambda text: float(re.findall(r"\d+", text)[-1]))
LONGEST = TextScore(lambda text: float(len(text)))


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_lm(max_positions=4096)


def counted_steps(engine: Engine) -> list[None]:
    """An entry for every step that the engine takes from now on, each of one pass of its model."""
    steps, step = list[None](), engine.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine.step = counted  # type: ignore[method-assign]
    return steps


@pytest.mark.invariant
@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_pipelines_are_repeatable_whoever_shares_their_passes(lm: Any, name: str) -> None:
    """On a real model: the same alone, beside another one, and preempted on the way."""
    search = PIPELINES[name].bind(lm.tokenizer)
    settings = {"temperature": 1.0, "max_new_tokens": 6 if name != "iter-drag" else 28, "drafter": None}
    alone = lm.search("Is it so?", search, **settings)
    ledger = alone[0].trace.ledger
    assert "malformed" not in alone[0].trace.ledger.counts or name == "archon"
    assert all(out.complete and out.prompt_tokens == lm.encode("Is it so?") for out in alone)
    assert ledger.counts["discarded"] == ledger.tokens - len(alone[0].tokens) and ledger.passes["model"] == ledger.depth
    engine = lm.engine()
    steps = counted_steps(engine)
    requests = [lm.request_for("Is it so?", **settings), lm.request_for("Why?", **settings)]
    jobs = [engine.enter(search.find(engine, request)) for request in requests]
    for _ in range(3):
        engine.step()
    engine.preempt(jobs[0])
    engine.run(jobs)
    assert [seq.generated for seq in jobs[0].result] == [out.tokens for out in alone]
    # Passes of the two were shared.
    assert len(steps) < 1.5 * ledger.passes["model"] + 10


def test_a_prompt_of_token_ids_alone_is_refused() -> None:
    for search in PIPELINES.values():
        with pytest.raises(SettingsError, match="search through `LLM`"):
            search.run(Engine(tiny_transformer(3)), Request([1, 2]))


def test_iad_shows_best_and_worst_and_never_falls() -> None:
    for level in ("none", "score", "best", "best-worst", "critique"):
        lm = ScriptedLLM(lambda asked: "be bold" if "wrong or weak" in asked.text else f"try {(asked.number * 7) % 10}")
        found = lm.search("Count up.", IAD(LAST, n=2, rounds=2, feedback=level), temperature=0.6, seed=5)
        answers = [asked for asked in lm.asked if "wrong or weak" not in asked.text]
        assert [asked.seed for asked in answers] == list(range(5, 5 + len(answers)))
        assert found[0].score == max(out.score for out in found) and len(found) == len(answers)
        later = answers[2].text
        assert ("try 7" in later) == (level in ("best", "best-worst", "critique"))
        assert ("try 0" in later) == (level in ("best-worst", "critique")) and ("be bold" in later) == (
            level == "critique"
        )
        assert ("7" in later) == (level != "none")
    # Without feedback it is best-of-n of all rounds, text by text.
    script = lambda asked: f"try {(asked.seed * 3) % 7}"  # noqa: E731
    rounds = ScriptedLLM(script).search("Count.", IAD(LAST, n=3, rounds=1, feedback="none"), temperature=1.0)
    pooled = ScriptedLLM(script).search("Count.", BestOfN(LAST, n=6), temperature=1.0)
    assert [(out.text, out.score) for out in rounds] == [(out.text, out.score) for out in pooled]
    # A later text as good as the best does not take its place, and two such rounds are the last.
    lm = ScriptedLLM(lambda asked: f"{asked.number} and 5")
    assert lm.search("?", IAD(LAST, n=1, rounds=9), temperature=1.0)[0].text == "0 and 5" and len(lm.asked) == 3


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


def test_a_model_that_is_run_here_is_held_to_the_form_of_a_verdict(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(archon_layers, "ranking", lambda text, n: said.append(text) or ranking(text, n))
    search = "archon:layers=generator(n=3)/ranker(top_k=3)"
    (*_, found) = lm.search("Is it so?", search, temperature=1.0, max_new_tokens=24, seed=4)
    assert len(said) == 1 and re.fullmatch(r"\[[123]\] > \[[123]\] > \[[123]\]", said[0])
    counts = found.trace.ledger.counts
    assert counts["judge_calls"] == 1 and "malformed" not in counts
    (*_, found) = lm.search("Is it so?", "archon:layers=generator(n=3)/verifier", temperature=1.0, max_new_tokens=24)
    assert found.trace.ledger.counts["judge_calls"] == 6 and "malformed" not in found.trace.ledger.counts


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "The Rhine."},
    {"role": "user", "content": [{"type": "text", "text": "And another one?"}]},
]


@pytest.mark.parametrize("name", ["archon", "iad", "llm-judge", "cheatsheet"])
def test_judges_critics_and_curators_see_all_turns(name: str, tmp_path: Path) -> None:
    def script(asked: Asked) -> Said:
        return Said("[1] x" if "its number in brackets" in asked.text else "1", {"1": 0.0})

    search: Any = {
        "archon": Archon((("generator",), ("critic",), ("fuser",))),
        "iad": IAD(LAST, n=1, rounds=1, feedback="critique"),
        "llm-judge": BestOfN(LLMJudge(), n=1),
        "cheatsheet": Cheatsheet(str(tmp_path / "memory.json")),
    }[name]
    lm = ScriptedLLM(script)
    lm.search(TURNS, search, temperature=1.0)
    judged = [asked.text for asked in lm.asked if isinstance(asked.prompt, str)]
    assert len(judged) == 1
    assert "system: Be brief.\n\nuser: Name a river.\n\nassistant: The Rhine.\n\nuser: And another one?" in judged[0]
    # A question alone is shown as it is.
    lm = ScriptedLLM(script)
    lm.search(TURNS[1:2], search, temperature=1.0)
    assert not any("user: Name" in asked.text for asked in lm.asked if isinstance(asked.prompt, str))


def test_a_question_is_replaced_and_what_tools_said_of_it_stays() -> None:
    called = [
        *TURNS,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "rivers"}}]},
        {"role": "tool", "content": "Elbe"},
    ]
    conversation = Conversation(called, lambda prompt: [], lambda constraint: constraint)
    asked = conversation.asking("Which?").prompt
    assert [turn["content"] for turn in asked] == ["Be brief.", "Name a river.", "The Rhine.", "Which?", None, "Elbe"]
    assert conversation.question == "And another one?"
    assert conversation.task.endswith('assistant: [{"function": {"name": "rivers"}}]\n\ntool: Elbe')


def test_iad_has_no_worst_where_nothing_is_worse() -> None:
    def shown(*scores: int) -> str:
        lm = ScriptedLLM(
            lambda asked: f"text{asked.number} {scores[asked.number] if asked.number < len(scores) else 1}"
        )
        lm.search("?", IAD(LAST, n=len(scores), rounds=1), temperature=1.0)
        return lm.asked[len(scores)].text

    equal = shown(0, 0, 0)
    assert "text0 0" in equal and "worst" not in equal and "text2" not in equal
    # Of the equally bad the oldest is shown.
    worse = shown(0, 5, 0)
    assert "text1 5" in worse and "worst" in worse and "text0 0" in worse and "text2" not in worse


def test_a_line_that_is_none_is_asked_for_again() -> None:
    documents = Documents(("cats sleep",))
    lm = ScriptedLLM(["Let me think.", "<think>hm</think>**So the final answer is:** cats"])
    (found,) = lm.search("Which?", IterDRAG(documents, n=1), temperature=1.0)
    assert found.text == "cats" and found.trace.ledger.counts["malformed"] == 1
    assert lm.asked[0].text == lm.asked[1].text and lm.asked[0].seed != lm.asked[1].seed


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


def test_documents_stand_worst_to_best_and_count() -> None:
    documents = Documents(("cats sleep", "red apples and red roses", "a red car", "nothing"))
    examples = (Demonstration("What do cats do?", "sleep", (("Which animal?", "cats"),)),)
    lm = ScriptedLLM(lambda asked: "blue")
    lm.search("Which apples are red?", DRAG(documents, examples, k=2, m=1))
    text = lm.asked[0].text
    order = [
        text.rindex(part) for part in ("cats sleep", "What do cats do?", "a red car", "red apples", "Which apples")
    ]
    assert order == sorted(order) and "Which animal" not in text
    lm = ScriptedLLM(["Follow up: who sleeps?", "Intermediate answer: cats", "So the final answer is: red", "unused"])
    (found,) = lm.search("Which apples are red?", IterDRAG(documents, examples, k=1, m=1, n=1))
    assert found.text == "red" and len(lm.asked) == 3 and "malformed" not in found.trace.ledger.counts
    first, second, third = (asked.text for asked in lm.asked)
    assert first.count("cats sleep") == 1 and second.count("cats sleep") == 2 and "who sleeps?\n" in third
    assert '"Follow up:" or "So the final' in first and 'Follow up:" or' not in third.rpartition("Write")[2]
    # What is no line of the three kinds is the answer, and is counted.
    (found,) = ScriptedLLM(["Let me think."]).search("Which?", IterDRAG(documents))
    assert found.text == "Let me think." and found.trace.ledger.counts["malformed"] == 1


def test_what_stands_is_returned_where_a_server_goes_away() -> None:
    with pytest.warns(UserWarning, match="found before"):
        (found, *_) = ScriptedLLM(["1", "2", Said("3 4", gone=True), "5"]).search("?", IAD(LAST, n=2), temperature=1.0)
    assert found.text == "2" and not found.complete and found.to_dict()["complete"] is False
    with pytest.warns(UserWarning):
        (found, *_) = ScriptedLLM(["1", "22", Said("", gone=True)]).search("?", BestOfN(LONGEST, n=3), temperature=1.0)
    assert found.text == "22" and not found.complete and found.trace.ledger.counts["cut"] == 1
    with pytest.warns(UserWarning):
        (found,) = ScriptedLLM([Said("begun and", gone=True)]).search("?", BestOfN(LONGEST, n=1))
    assert found.text == "begun and" and not found.complete
    # Nobody is left to judge.
    script = lambda asked: Said("", gone=True) if "Question:" in asked.text else "text"  # noqa: E731
    for search in (BestOfN(LLMJudge(), n=2), WeightedVote(LLMJudge(), n=2, answer="whole"), IAD(LLMJudge(), n=2)):
        with pytest.warns(UserWarning, match="not judged|found before"):
            (found, *_) = ScriptedLLM(script).search("?", search, temperature=1.0)
        assert found.text == "text" and not found.complete
    with pytest.raises(ServerError):
        ScriptedLLM([Said("", gone=True)] * 2).search("?", IAD(LAST, n=2))


def test_calls_of_one_layer_share_passes(lm: Any) -> None:
    """Four judged texts cost as many passes as one, and are what they are alone."""
    engine = lm.engine()
    steps = counted_steps(engine)
    request = lm.request_for("Is it so?", max_new_tokens=5, drafter=None)
    assert request.conversation is not None

    def asking(prompts: list[str], apart: bool) -> Any:
        from decodery.engine.calls import Calls

        calls = Calls(engine, request, request.conversation)
        said = [calls.conversation.apart(prompt) for prompt in prompts]
        groups = [[each] for each in said] if apart else [said]
        found = yield from gather([calls.judge(group, progress=silent) for group in groups])
        return [seq.generated for group in found for seq in group]

    alone = []
    for prompt in ("one", "two", "three", "four"):
        before = len(steps)
        alone += engine.finish(asking([prompt], False))
        passes = len(steps) - before
    for apart in (False, True):
        before = len(steps)
        assert engine.finish(asking(["one", "two", "three", "four"], apart)) == alone
        assert len(steps) - before <= passes + 1


def test_self_refine_rewrites_what_it_finds_wrong_and_stops_where_nothing_is() -> None:
    def script(asked: Asked) -> str:
        if "Look for errors" in asked.text:
            return "[No errors]" if "draft-4" in asked.text else f"not yet: {asked.number}"
        return f"draft-{asked.number}"

    lm = ScriptedLLM(script)
    found = lm.search("Say it.", SelfRefine(), temperature=0.7)
    # An answer, and feedback and a new answer in turns, until the feedback says so.
    assert [out.text for out in found] == ["draft-4", "draft-2", "draft-0"] and len(lm.asked) == 6
    feedback, rewrite = lm.asked[3].text, lm.asked[4].text
    assert "Say it." in feedback and "draft-2" in feedback and "draft-0" not in feedback
    assert "draft-2" in rewrite and "not yet: 3" in rewrite and "not yet: 1" not in rewrite
    assert len(ScriptedLLM(script).search("Say it.", SelfRefine(iterations=1), temperature=0.7)) == 2
    plain = ScriptedLLM(script)
    assert plain.search("Say it.", SelfRefine(iterations=0))[0].text == "draft-0" and len(plain.asked) == 1
    with pytest.raises(SettingsError, match="iterations of at least 1"):
        SelfRefine(iterations=-1)


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


def test_answers_are_compared_two_by_two_in_both_orders() -> None:
    def script(asked: Asked) -> str:
        if "[A] or [B]" not in asked.text:
            return f"text {(asked.number * 7) % 4}"
        first, second = (int(each) for each in re.findall(r"text (\d)", asked.text))
        # A judge that likes large numbers, and the first answer where they are near.
        if abs(first - second) == 1:
            return "[A]"
        return "[A]" if first > second else "The better one is [B]."

    lm = ScriptedLLM(script)
    found = lm.search("Count.", Pairwise(n=4), temperature=1.0)
    assert len(lm.asked) == 4 + 12 and found[0].trace.ledger.counts["comparisons"] == 12
    # 3 beats 0 and 1, 2 beats 0; neighbours are half a win for each.
    assert {out.text: out.score for out in found} == pytest.approx(
        {"text 3": 2.5 / 3, "text 2": 2 / 3, "text 1": 1 / 3, "text 0": 0.5 / 3}
    )
    assert [out.text for out in found] == ["text 3", "text 2", "text 1", "text 0"]
    silent_judge = ScriptedLLM(lambda asked: "who knows" if "[A] or [B]" in asked.text else f"text {asked.number}")
    equal = silent_judge.search("Count.", Pairwise(n=2), temperature=1.0)
    assert [(out.text, out.score) for out in equal] == [("text 0", 0.5), ("text 1", 0.5)]
    with pytest.raises(SettingsError, match="16 at most"):
        Pairwise(n=17)

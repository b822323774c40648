"""Searches that ask after prompts of their own: what they ask, what they keep, and what they spend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from decodery.core.conversation import Conversation
from decodery.core.errors import ServerError, SettingsError
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
from decodery.step.forward_request import gather
from decodery.testing import tiny_transformer
from methods import PIPELINES
from scripted_lm import Asked, Said, ScriptedLLM
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

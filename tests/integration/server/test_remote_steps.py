"""Searches over steps after a server: the same texts as here, one step a request, however streams are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import decodery as dc
from decodery.core.errors import ServerError, SettingsError, UnsupportedModel
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Scores
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.chat import ChatTemplate
from decodery.scorers import LLMJudge, TextScore
from decodery.search import (
    DVTS,
    MCTS,
    AStar,
    BestOfN,
    BudgetForcing,
    Lookahead,
    ParticleFilter,
    SpecReason,
    StepBeam,
    TreeOfThoughts,
)
from decodery.testing.models import Counted
from scripted_server import Reply, scripted, stream
from serving import TEMPLATE, serving, tiny_lm

WRITING: dict[str, Any] = {"max_new_tokens": 24, "seed": 3}
LETTERS = [10, *range(32, 127)]


class Plain(Counted):
    """A model that writes ASCII, so that every beginning of a text can be sent as one."""

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        found = super().forward(batch, **settings)
        others = torch.ones(found.logits.shape[-1], dtype=torch.bool, device="cpu")
        others[LETTERS] = False
        found.logits[:, others] = -1e9
        return found


def share(text: str) -> float:
    """How many of its letters are vowels: a score of beginnings and answers between 0 and 1."""
    return (1 + sum(letter in "aeiou" for letter in text)) / (2 + len(text))


VOWELS = TextScore(share, share)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, Any]]:
    lm = tiny_lm(max_positions=4096)
    plain = LLM(LoadedModel(Plain(lm.model), lm.tokenizer, ChatTemplate(TEMPLATE), "tiny", "float64"))  # type: ignore[arg-type]
    with serving(plain) as (_, url):
        yield plain, dc.remote(url)


GROWN = {
    "particle-filter": ParticleFilter(VOWELS, particles=3, step_tokens=5, delimiter="e"),
    "step-beam": StepBeam(VOWELS, n=4, m=2, step_tokens=5, delimiter="e"),
    "dvts": DVTS(VOWELS, n=4, m=2, step_tokens=5, delimiter="e"),
    "a-star": AStar(VOWELS, k=2, step_tokens=5, delimiter="e"),
    "mcts": MCTS(VOWELS, n=2, simulations=2, rounds=3, step_tokens=5, delimiter="e"),
    "tree-of-thoughts": TreeOfThoughts(VOWELS, n=2, b=2, rounds=3, step_tokens=5, delimiter="e"),
    "lookahead": Lookahead(StepBeam(VOWELS, n=2, m=2, step_tokens=5, delimiter="e"), k=1),
}


@pytest.mark.parametrize("route", [{}, {"apply_chat_template": False}])
@pytest.mark.parametrize("name", GROWN)
def test_without_chance_texts_are_those_of_the_model_here(
    both: tuple[LLM, Any], name: str, route: dict[str, Any]
) -> None:
    here, there = (each.search("Is it so?", GROWN[name], temperature=0.0, **WRITING, **route) for each in both)
    assert [out.text for out in there] == [out.text for out in here] and len(there[0].tokens) == 24
    assert [out.score for out in there] == pytest.approx([out.score for out in here])
    steps = [grown.tokens for grown in there[0].trace.grown]
    assert len(steps) == len(here[0].trace.grown) > 1
    # A request a step, which is closed where the step ends.
    assert there[0].trace.ledger.passes["server"] >= len(steps)


def test_texts_drawn_first_are_those_of_the_model_here(both: tuple[LLM, Any]) -> None:
    """Later steps are drawn by other seeds: a server draws every request from its beginning."""
    search = StepBeam(VOWELS, n=3, m=3, step_tokens=24, rounds=2, delimiter=None)
    here, there = (each.search("Is it so?", search, temperature=1.0, **WRITING) for each in both)
    assert [out.text for out in there] == [out.text for out in here]
    drawn = [each.search("Is it so?", GROWN["particle-filter"], temperature=1.0, **WRITING) for each in both]
    steps = [[outputs[0].trace.grown[n].tokens for n in range(3)] for outputs in drawn]
    lm, remote = both
    assert [lm.tokenizer.decode(each) for each in steps[0]] == [remote.tokenizer.decode(each) for each in steps[1]]
    again = both[1].search("Is it so?", GROWN["particle-filter"], temperature=1.0, **WRITING)
    assert [out.text for out in again] == [out.text for out in drawn[1]]
    first, second = (drawn[1][0].text[at : at + 5] for at in (0, 5))
    assert first != second


@pytest.mark.parametrize("name", ["step-beam", "particle-filter", "best-of-n"])
def test_a_search_over_a_server_goes_on_from_its_record(both: tuple[LLM, Any], name: str, tmp_path: Path) -> None:
    search = GROWN.get(name, BestOfN("log-probability", n=4))

    def found(until: int | None = None, **settings: Any) -> list[Any]:
        turns = 0

        def progress(what: str, done: int, total: int) -> None:
            nonlocal turns
            turns += 1
            if turns == until:
                raise KeyboardInterrupt

        there = dc.remote(both[1].model.endpoint.base)
        outputs = there.search("Is it so?", search, progress=progress, temperature=1.0, **WRITING, **settings)
        return [(out.text, out.score, out.trace.ledger.passes.get("server", 0)) for out in outputs]

    whole, record = found(), tmp_path / "record.jsonl"
    with pytest.raises(KeyboardInterrupt):
        found(9 if name == "best-of-n" else 20, record=record)
    again = found(record=record)
    assert [each[:2] for each in again] == [each[:2] for each in whole]
    # What stood in the file is not requested again, and at last all of it stands there.
    assert name == "best-of-n" or again[0][2] < whole[0][2]
    last = found(record=record)
    assert [each[:2] for each in last] == [each[:2] for each in whole] and last[0][2] == 0


def test_likelihoods_are_those_that_the_server_tells(both: tuple[LLM, Any]) -> None:
    search = "best-of-n:scorer=log-probability(of=sum),n=3"
    here, there = (each.search("Is it so?", search, temperature=1.0, **WRITING) for each in both)
    assert [out.text for out in there] == [out.text for out in here]
    assert [out.score for out in there] == pytest.approx([out.score for out in here], abs=1e-4)


def test_a_second_server_writes_steps(both: tuple[LLM, Any]) -> None:
    lm, remote = both
    search = SpecReason(VOWELS, step_tokens=5, delimiter="e", threshold=0.3, model=remote.model.endpoint.base)
    (out,) = remote.search("Is it so?", search, temperature=0.0, **WRITING)
    assert out.text == lm.generate("Is it so?", **WRITING).text
    assert {"draft", ""} >= {grown.author for grown in out.trace.grown} > {""}
    with pytest.raises(SettingsError, match="give its URL"):
        remote.search("Is it so?", SpecReason(VOWELS, threshold=0.3), **WRITING)


def test_a_server_is_asked_to_sample_as_a_model_here_does(both: tuple[LLM, Any]) -> None:
    """Servers cut distributions by defaults of their own where a request does not say that they should not."""
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    with told(stream("a")) as (url, asked):
        dc.remote(url).generate("q", temperature=1.0)
    assert {name: asked[0].get(name) for name in neutral} == neutral
    for settings in ({"top_k": 3}, {"min_p": 0.2}):
        here, there = (each.generate("Is it so?", temperature=1.0, **WRITING, **settings) for each in both)
        assert here.text == there.text

    def strict(body: dict[str, Any]) -> bool:
        return not (neutral.keys() - {"top_p"}) & body.keys()

    with scripted(stream("a"), accepts=strict) as (url, asked):
        remote = dc.remote(url)
        remote.generate("q", temperature=1.0)
        with pytest.raises(UnsupportedModel, match="leave out top-k"):
            remote.generate("q", temperature=1.0, top_k=3)
    assert strict(asked[0]) and asked[0]["top_p"] == 1.0


def thoughts(handler: Any, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    for delta in ({"role": "assistant", "content": ""}, {"reasoning": "So"}, {"content": "Yes"}):
        handler.wfile.write(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode())
    handler.wfile.write(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')


def test_steps_of_a_model_that_thinks_apart_are_refused() -> None:
    with told(thoughts, thoughts) as (url, _):
        assert dc.remote(url).generate("q").text == "Yes"
        with pytest.raises(ServerError, match="without its reasoning parser"):
            dc.remote(url).search("q", StepBeam(VOWELS, n=1, m=1))


def test_thinking_is_forced_by_what_the_text_says() -> None:
    replies = stream("I think", " so</th", "ink>"), stream(" more</think>Yes"), stream("the end")
    with told(*replies) as (url, asked):
        (out,) = dc.remote(url).search("q", BudgetForcing(ignore=1, wait=" Wait"))
    assert out.text == "I think so Wait more</think>the end"
    assert [body["messages"][-1]["content"] for body in asked] == [
        "q",
        "I think so Wait",
        "I think so Wait more</think>",
    ]
    with told(stream("a ", "b ", "c "), stream("fine")) as (url, asked):
        (out,) = dc.remote(url).search("q", BudgetForcing(ignore=0, most=2, cue=" So:"))
    assert out.text == "a b </think> So:fine" and out.trace.ledger.counts["forced"] > 0


def told(*replies: Reply, trims: bool = False) -> Any:
    """A server that goes on with messages of the assistant at the end, as its counts of prompts say."""

    def counted(body: dict[str, Any]) -> dict[str, Any]:
        last = body["messages"][-1]
        said = last["content"].rstrip() if trims else last["content"]
        return {"usage": {"prompt_tokens": 5 + (len(said) if last["role"] == "assistant" else 0)}}

    return scripted(*replies, probed=counted)


def test_steps_do_not_depend_on_how_a_stream_is_cut() -> None:
    written = "one\n\ntwo\n\nthree"
    for cut in (["one\n\ntwo\n\nthree"], list(written), ["one\n", "\ntwo", "\n", "\nthree"]):
        seen: list[str] = []

        def score(text: str, seen: list[str] = seen) -> float:
            seen.append(text)
            return 0.5

        def on(number: int, cut: list[str] = cut) -> Reply:
            """What is left of the text after so many steps, cut in the same places."""
            left, pieces = len("".join(written.split("\n\n")[:number])) + 2 * number, []
            for piece in cut:
                pieces.append(piece[left:])
                left = max(0, left - len(piece))
            return stream(*[piece for piece in pieces if piece])

        replies = [on(number) for number in (0, 0, 1, 1, 2, 2)]
        with told(*replies) as (url, asked):
            found = dc.remote(url, connections=1).search(
                "q", StepBeam(TextScore(score, score), n=2, m=1), temperature=1.0
            )
        assert found[0].text == written and len(found) == 1
        # Equal texts are scored once.
        assert seen == ["one\n\n", "one\n\ntwo\n\n", written]
        assert asked[-1]["messages"][-1] == {"role": "assistant", "content": "one\n\ntwo\n\n"}


def test_spaces_that_a_template_leaves_out_are_not_written_twice() -> None:
    for trims in (False, True):
        with told(stream("one\n\n"), stream("\n\n", " two"), trims=trims) as (url, _):
            found = dc.remote(url).search("q", StepBeam(VOWELS, n=1, m=1, rounds=2))
        assert found[0].text == ("one\n\ntwo" if trims else "one\n\n\n\n two")


def test_a_step_that_breaks_off_goes_on_from_there() -> None:
    replies = stream("one", whole=False), stream(" and\n\n"), stream("two", whole=False)
    with told(*replies) as (url, asked):
        cut = dc.remote(url, retries=0).search("q", StepBeam(VOWELS, n=1, m=1))
    assert cut[0].text == "one" and not cut[0].complete
    with told(*replies, stream("!")) as (url, asked):
        found = dc.remote(url, retries=1).search("q", StepBeam(VOWELS, n=1, m=1, rounds=9))
        assert found[0].text == "one and\n\ntwo!" and found[0].complete
        assert found[0].trace.ledger.counts["retries"] == 2 and len(asked) == 4


def test_servers_that_cannot_go_on_are_named() -> None:
    closed = scripted(stream("one\n\n"), probed=lambda body: {"usage": {"prompt_tokens": 5 * len(body["messages"])}})
    with closed as (url, _), pytest.raises(UnsupportedModel, match="continue_final_message"):
        dc.remote(url).search("q", StepBeam(VOWELS, n=1, m=1))
    with scripted() as (url, _):
        with pytest.raises(UnsupportedModel, match="no server has a request field for rows scored one by one"):
            dc.remote(url).search("q", "step-beam:scorer=self-evaluation")
        with pytest.raises(SettingsError, match="give the delimiter of steps as a text"):
            dc.remote(url).search("q", StepBeam(VOWELS, n=1, m=1, delimiter=(3,)))
        with pytest.raises(SettingsError, match="give end, wait and cue as texts"):
            dc.remote(url).search("q", BudgetForcing((3,)))


def test_labels_that_are_not_listed_have_a_bound() -> None:
    judge = LLMJudge(labels=("1", "2", "3"))
    logs = judge._logs({"3": -0.1, " 2": -2.0, "x": -5.0})
    assert logs == pytest.approx([-5.0, -2.0, -0.1])
    assert judge._logs({"x": -0.1}) == [-float("inf")] * 3

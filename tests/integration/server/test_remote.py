"""A model on a server: the same texts and searches as here, and a sentence for all that cannot be."""

from __future__ import annotations

import json
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

import decodery as dc
from decodery.cli.conversation import Conversation
from decodery.constraints import Regex
from decodery.core.errors import DecoderyError, ServerError, SettingsError, UnsupportedModel
from decodery.scorers import TextScore
from decodery.search import IAD
from methods import DRAWING, SAMPLED, SEARCHES
from scripted_server import say, scripted, stream
from serving import serving, tiny_lm

WRITING = {"temperature": 1.0, "max_new_tokens": 8, "seed": 3}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Any, Any]]:
    """A model here, and the same one after this package's own server."""
    lm = tiny_lm(max_positions=4096)
    with serving(lm) as (_, url):
        yield lm, dc.remote(url)


def test_texts_are_those_of_the_model_itself(both: tuple[Any, Any]) -> None:
    lm, remote = both
    assert remote.model.offers.chat and remote.model.offers.plain and remote.model.capabilities.logprobs
    for settings in ({}, {"apply_chat_template": False}):
        here, there = (each.generate("Is it so?", n=2, **WRITING, **settings) for each in (lm, remote))
        assert [out.text for out in there] == [out.text for out in here]
        assert [out.finish_reason for out in there] == [out.finish_reason for out in here]
        # A piece for each token, however many come at a time.
        assert [len(out.tokens) for out in there] == [len(out.tokens) for out in here]
    _, body = remote.model.body(remote.engine().open(remote.request_for("q")))
    # With 0 llama.cpp tells of no log-probabilities at all.
    assert body["logprobs"] is True and body["top_logprobs"] == 1
    ledger = there[0].trace.ledger
    assert ledger.passes == {"server": 1} and ledger.tokens == len(there[0].tokens)
    assert ledger.counts["prompt_tokens"] == len(here[0].prompt_tokens)
    *pieces, last = remote.stream("Is it so?", **WRITING)
    assert "".join(piece.text for piece in pieces) == last.output.text
    stop = here[0].text[2]
    stopped = remote.generate("Is it so?", stop=stop, apply_chat_template=False, **WRITING)
    assert stopped.text == here[0].text.partition(stop)[0] and stopped.finish_reason == "stop"


def test_a_password_is_sent_and_stands_in_no_message() -> None:
    with serving(tiny_lm(), keys={"other": "a"}) as (_, url), pytest.raises(ServerError) as refused:
        dc.remote(url.replace("://", "://user:secret@"))
    assert f"{url}/v1 refuses this key" in str(refused.value) and "secret" not in str(refused.value)
    with pytest.raises(SettingsError, match="is at a URL"):
        dc.remote("http://local\x00host")


def test_a_conversation_with_a_server_says_the_same(both: tuple[Any, Any]) -> None:
    here, there = (Conversation(each, WRITING) for each in both)
    for turn in ("Is it so?", "Since when?"):
        for each in (here, there):
            each.say(turn, lambda piece: None)
    assert here.messages == there.messages and len(there.messages) == 4


@pytest.mark.parametrize("search", ["self-consistency:n=3,answer=whole", "first-finish"])
def test_searches_by_whole_texts_find_the_same(both: tuple[Any, Any], search: str) -> None:
    here, there = (each.search("Is it so?", search, **WRITING) for each in both)
    assert sorted(out.text for out in there) == sorted(out.text for out in here) and all(out.complete for out in there)
    assert there[0].trace.ledger.passes["server"] >= 2


def test_pipelines_run_and_count_what_judges_read(both: tuple[Any, Any]) -> None:
    critical = IAD(TextScore(len), n=2, rounds=1, feedback="critique")
    here, there = (each.search("Is it so?", critical, **WRITING) for each in both)
    assert here[0].trace.ledger.counts["judge_calls"] == 1
    assert [out.text for out in there] == [out.text for out in here]
    assert here[0].trace.ledger.counts == {
        name: there[0].trace.ledger.counts[name] for name in here[0].trace.ledger.counts
    }


def test_a_judge_that_names_no_label_is_named(both: tuple[Any, Any]) -> None:
    """The random model has no label among its most likely tokens, which only the one that is run here tells all of."""
    here, remote = both
    search = "best-of-n:scorer=llm-judge,n=2"
    assert 0 < here.search("Is it so?", search, **WRITING)[0].score < 1
    with pytest.raises(SettingsError, match="the judge was to say one of 1, 2, 3, 4, 5, and began with"):
        remote.search("Is it so?", search, **WRITING)


def test_what_a_server_cannot_do_is_refused_before_it_is_asked(both: tuple[Any, Any]) -> None:
    _, remote = both
    asked, remote.model.endpoint.stream = remote.model.endpoint.stream, None
    try:
        for name, search in SEARCHES.items():
            if name not in SAMPLED | {"compute-optimal", "value-guided"}:
                with pytest.raises(DecoderyError):
                    remote.search("x", search, temperature=float(name in DRAWING))
        for settings, words in (
            ({"drafter": "prompt-lookup"}, "needs rows scored"),
            ({"logits_source": "dola"}, "needs rows scored"),
            ({"typical": 0.9, "temperature": 1.0}, "leave out typical"),
            ({"constraint": Regex("a+")}, "load the model here"),
        ):
            with pytest.raises(UnsupportedModel, match=words):
                remote.generate("x", **settings)
        with pytest.raises(UnsupportedModel, match="best-of-n needs rows scored"):
            remote.search("x", "best-of-n:scorer=rating")
    finally:
        remote.model.endpoint.stream = asked


def busy(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    say(handler, 429, {"error": {"message": "later"}}, **{"retry-after": "0.01"})


def silent(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    stream("begun", whole=False)(handler, body)
    handler.wfile.flush()
    handler.connection.settimeout(5)
    with suppress(OSError):
        handler.connection.recv(1)


def test_busy_servers_are_asked_again_and_broken_ones_leave_what_they_wrote() -> None:
    with scripted(busy, busy, stream("fine", " text")) as (url, asked):
        found = dc.remote(url).generate("q", temperature=0.5, stop=["END"])
        assert found.text == "fine text" and found.complete and found.trace.ledger.counts["retries"] == 2
        assert asked[0] == asked[2] and asked[0]["temperature"] == 0.5 and asked[0]["stop"] == ["END"]
        assert asked[0]["messages"] == [{"role": "user", "content": "q"}] and "logprobs" not in asked[0]
    broken = {
        "in the middle": stream("begun", whole=False),
        "with an error": stream("begun", last='data: {"error": {"message": "no memory"}}\n\n'),
        "no piece of a text": stream("begun", last="data: {nonsense\n\n"),
        "nothing for": silent,
    }
    for reply in broken.values():
        with scripted(reply) as (url, _):
            found = dc.remote(url, timeout=0.3).generate("q")
            assert found.text == "begun" and not found.complete and found.finish_reason == "cancelled"
    with scripted(*[busy] * 2) as (url, _), pytest.raises(ServerError, match="429: later"):
        dc.remote(url, retries=1).generate("q")
    with scripted(stream(whole=False)) as (url, _), pytest.raises(ServerError, match="in the middle"):
        dc.remote(url).generate("q")


def test_a_search_goes_on_without_the_texts_that_were_cut() -> None:
    replies = stream("the answer is 4"), stream("the answer", whole=False), stream("so 4")
    with scripted(*replies) as (url, _), pytest.warns(UserWarning, match="went away"):
        found = dc.remote(url, connections=1).search("q", "self-consistency:n=3", temperature=1.0)
    assert found[0].text == "the answer is 4" and found[0].score == 1.0 and not found[0].complete
    # A pipeline returns what stood before.
    with (
        scripted(stream("first"), stream("crit", whole=False)) as (url, _),
        pytest.warns(UserWarning, match="found before"),
    ):
        (out,) = dc.remote(url).search("q", "archon:layers=generator/critic/fuser", temperature=1.0)
    assert out.text == "first" and not out.complete


def test_whoever_stops_waiting_closes_the_connection() -> None:
    gone = threading.Event()

    def endless(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        try:
            handler.send_response(200)
            handler.end_headers()
            while not gone.wait(0.01):
                stream_piece = {"choices": [{"delta": {"content": "on "}}]}
                handler.wfile.write(f"data: {json.dumps(stream_piece)}\n\n".encode())
        except OSError:
            gone.set()

    with scripted(endless, endless) as (url, _):
        remote = dc.remote(url)
        pieces = remote.stream("q", max_new_tokens=100000)
        assert next(pieces).text
        pieces.close()
        assert gone.wait(20)
        gone.clear()
        # A server that writes more than was asked for is not listened to.
        found = remote.generate("q", max_new_tokens=3)
        assert len(found.tokens) == 3 and found.finish_reason == "length" and gone.wait(20)


def test_servers_that_are_none() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match="there is no server at"):
        dc.remote(f"http://127.0.0.1:{port}", retries=0)
    with pytest.raises(SettingsError, match="at a URL"):
        dc.remote("localhost")
    with scripted(models=("a", "b")) as (url, _):
        with pytest.raises(SettingsError, match="name one by model"):
            dc.remote(url)
        with pytest.raises(ServerError, match="has no model 'c'"):
            dc.remote(url, "c")
        remote = dc.remote(url, "b")
        assert not remote.model.capabilities.logprobs
        with warnings.catch_warnings(), pytest.raises(UnsupportedModel, match="log-probabilities"):
            warnings.simplefilter("error")
            remote.search("q", "best-of-n:scorer=llm-judge,n=2", temperature=1.0)

"""Rerankers' routes, and those of vLLM and llama.cpp that give no text of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import cohere
import httpx
import pytest

from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.scorers import TextScore
from decodery.testing import tiny_transformer
from serving import KNOWS_TOOLS, TOOLS, serving, tiny_lm, user, wait_until
from tiny_models import make_tokenizer

SIGNS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
DOCUMENTS = ["The tide is high.", "Bread is baked.", "Rivers run to the sea, which has tides."]


def filler() -> LLM:
    """A model with the tokens of Qwen2.5-Coder for gaps and files."""
    backend = make_tokenizer()
    backend.add_special_tokens(list(SIGNS))
    tokenizer = Tokenizer(backend, bos_id=None, eos_ids=(257,))
    model = tiny_transformer(1, vocab_size=backend.get_vocab_size(), max_positions=2048)
    return LLM(LoadedModel(model, tokenizer, None, "tiny", "float64"))


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm(KNOWS_TOOLS)


@pytest.fixture(scope="module")
def url(lm: LLM) -> Iterator[str]:
    with serving(lm) as (_, address):
        yield address


@pytest.fixture(scope="module")
def gaps() -> Iterator[tuple[LLM, str]]:
    found = filler()
    with serving(found) as (_, address):
        yield found, address


def post(url: str, path: str, body: Any, status: int = 200) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_documents_are_ranked_by_the_scorer(lm: LLM, url: str) -> None:
    asked = {"model": "tiny", "query": "tides?", "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]}
    found = post(url, "/v1/rerank", asked)
    assert sorted(each["index"] for each in found["results"]) == [0, 1, 2]
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    assert all(each["document"]["text"] == DOCUMENTS[each["index"]] for each in found["results"])
    best = post(url, "/v2/rerank", {**asked, "top_n": 1, "return_documents": False})["results"]
    assert best == [{"index": found["results"][0]["index"], "relevance_score": scores[0]}]
    # What vLLM calls scores are the same numbers, in the order of the documents.
    same = post(url, "/score", {"text_1": "tides?", "text_2": DOCUMENTS})
    assert same["object"] == "list" and same["usage"] == found["usage"]
    assert {each["index"]: each["score"] for each in same["data"]} == {
        each["index"]: each["relevance_score"] for each in found["results"]
    }
    # A named scorer, by the model's own log-probabilities of the document after the query.
    own = post(url, "/score", {"queries": "tides?", "documents": DOCUMENTS, "decodery": {"scorer": "log-probability"}})
    prompt = [*lm.encode("tides?")]
    for each, document in zip(own["data"], DOCUMENTS, strict=True):
        tokens = [*prompt, *map(ord, document)]
        echoed = post(url, "/v1/completions", {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0})
        known = echoed["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]
        assert each["score"] == pytest.approx(sum(known) / len(known), abs=1e-6)


def test_coheres_client_reranks(url: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "query": "tides?", "top_n": 2}
    ranked = post(url, "/v1/rerank", {**asked, "documents": DOCUMENTS})["results"]
    expected = [(each["index"], each["relevance_score"]) for each in ranked]
    first = cohere.Client(api_key="none", base_url=url)
    found = first.rerank(**asked, documents=[{"text": text} for text in DOCUMENTS], rank_fields=["text"])
    assert [(each.index, each.relevance_score) for each in found.results] == expected
    assert [each.document.text for each in found.results if each.document] == [DOCUMENTS[n] for n, _ in expected]
    with pytest.raises(cohere.BadRequestError, match="rank_fields is not supported"):
        first.rerank(**asked, documents=DOCUMENTS, rank_fields=["title"])
    second = cohere.ClientV2(api_key="none", base_url=url)
    found = second.rerank(**asked, documents=DOCUMENTS)
    assert [(each.index, each.relevance_score) for each in found.results] == expected
    # Of longer documents the beginning is read.
    cut = second.rerank(**asked, documents=DOCUMENTS, max_tokens_per_doc=8).results
    alone = second.rerank(**asked, documents=[text[:8] for text in DOCUMENTS]).results
    assert [(each.index, each.relevance_score) for each in cut] == [
        (each.index, each.relevance_score) for each in alone
    ]
    assert [each.relevance_score for each in cut] != [score for _, score in expected]


def test_scorers_that_write_texts_rank_nothing(url: str) -> None:
    body = {"query": "tides", "documents": ["the moon"], "decodery": {"scorer": "infalign:scorer=log-probability"}}
    refused = httpx.post(f"{url}/v1/rerank", json={"model": "tiny", **body})
    assert refused.status_code == 400 and "writes texts of its own" in refused.json()["error"]["message"]


def test_a_server_may_have_a_scorer_of_its_own() -> None:
    with serving(tiny_lm(None), scorer=TextScore(lambda text: float(len(text)))) as (_, url):
        found = post(url, "/rerank", {"query": "q", "documents": ["a", "aaa", "aa"], "return_documents": False})
    assert [(each["index"], each["relevance_score"]) for each in found["results"]] == [(1, 3.0), (2, 2.0), (0, 1.0)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "decodery": {"scorer": "program-tests:file=/etc/x"}}, None),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b" * 100_000}, None),
        ("/infill", {"input_prefix": "a"}, None),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(url: str, path: str, body: Any, param: str | None) -> None:
    error = post(url, path, body, 400)["error"]
    assert error["message"] and (param is None or error["param"].startswith(param))


def test_infill_reads_files_and_the_gap_as_qwen_has_them(gaps: tuple[LLM, str]) -> None:
    lm, url = gaps
    asked: dict[str, Any] = {
        "input_prefix": "def f(",
        "input_suffix": "\n    return x",
        "prompt": "x",
        "input_extra": [{"filename": "a.py", "text": "x = <|fim_middle|>1\n"}],
        "n_predict": 12,
        "samplers": ["top_k"],
        "n_indent": 4,
    }
    answer = httpx.post(f"{url}/infill", json=asked, timeout=60)
    assert answer.status_code == 200 and "samplers" in answer.headers["warning"]
    prefix, suffix, middle, repository, file = (lm.tokenizer.token_id(sign) for sign in SIGNS)
    text = lm.tokenizer.encode_content  # What others wrote holds no control token, however it is spelled.
    written = text("a.py\nx = <|fim_middle|>1\n", [(0, 99)]).ids
    tokens = [repository, *map(ord, "myproject\n"), file, *written, file, *map(ord, "filename\n")]
    tokens += [prefix, *map(ord, "def f(x"), suffix, *map(ord, "\n    return x"), middle]
    expected = lm.generate(tokens, max_new_tokens=12)
    found = answer.json()
    assert found["content"] == expected.text and found["tokens_evaluated"] == len(tokens)
    assert found["tokens_predicted"] == len(expected.tokens) and found["stop"] and not found["truncated"]
    assert found["stop_type"] == {"length": "limit", "stop": "eos"}[expected.finish_reason]
    pieces = []
    with httpx.stream("POST", f"{url}/infill", json={**asked, "stream": True}, timeout=60) as stream:
        pieces = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert "".join(each["content"] for each in pieces) == expected.text
    assert [each["stop"] for each in pieces] == [*[False] * (len(pieces) - 1), True] and len(pieces) > 2
    stop = expected.text[3]
    cut = post(url, "/infill", {**asked, "stop": [stop], "response_fields": ["content", "timings/predicted_n", "no"]})
    assert cut == {"content": expected.text.partition(stop)[0], "timings/predicted_n": cut["timings/predicted_n"]}
    whole = post(url, "/infill", {**asked, "stop": [stop]})
    assert (whole["stop_type"], whole["stopping_word"]) == ("word", stop)
    with serving(lm, keys={"one": "alice"}, defaults={"alice": {"max_tokens": 2}}) as (_, own):
        short = httpx.post(f"{own}/infill", json={"input_prefix": "a"}, headers={"x-api-key": "one"}, timeout=60)
    assert short.json()["tokens_predicted"] == 2


def test_infill_without_tokens_for_files_puts_them_before_the_gap() -> None:
    backend = make_tokenizer()
    backend.add_special_tokens(list(SIGNS[:3]))
    tokenizer = Tokenizer(backend, bos_id=None, eos_ids=(257,))
    prefix, suffix, middle = (tokenizer.token_id(sign) for sign in SIGNS[:3])
    head = [*map(ord, "\n\n--- snippet ---\n\nx = 1")]
    assert tokenizer.infill("a", "b", [("a.py", "x = 1")]) == [*head, prefix, ord("a"), suffix, ord("b"), middle]


def test_tokens_in_the_forms_of_vllm_and_of_llama_cpp(lm: LLM, url: str) -> None:
    tokens = lm.tokenizer.encode("Ah é")
    found = post(url, "/tokenize", {"model": "tiny", "prompt": "Ah é", "return_token_strs": True})
    assert (found["tokens"], found["count"], found["max_model_len"]) == (tokens, len(tokens), 2048)
    assert found["token_strs"][-3:] == [" ", "bytes:\\xc3", "bytes:\\xa9"]
    assert post(url, "/tokenize", {"prompt": "Ah", "add_special_tokens": False})["tokens"] == [65, 104]
    chat = {"messages": user("now?"), "tools": TOOLS, "add_generation_prompt": True}
    expected = lm.tokenizer.encode("weather;now;<|im_start|>user\nnow?<|im_end|>\n<|im_start|>assistant\n")
    assert post(url, "/tokenize", chat)["tokens"] == expected
    plain = post(url, "/tokenize", {"content": "Ah é", "with_pieces": True})
    assert plain == {"tokens": [*({"id": ord(sign), "piece": sign} for sign in "Ah "),
                                {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]}  # fmt: skip
    special = lm.tokenizer.piece(257).decode()
    assert post(url, "/tokenize", {"content": special})["tokens"] == [257]
    spelled = post(url, "/tokenize", {"content": special, "parse_special": False})["tokens"]
    assert spelled == [*map(ord, special)]
    text = post(url, "/detokenize", {"model": "tiny", "tokens": [65, 104, 257]})
    assert text["prompt"] == text["content"] == "Ah" + special


def test_slots_say_what_is_in_progress() -> None:
    with serving(tiny_lm(), max_running=3) as (server, url):
        body = {
            "prompt": "Once",
            "max_tokens": 1900,
            "stream": True,
            "ignore_eos": True,
            "decodery": {"drafter": "none"},
        }
        found: list[Any] = []

        def processing() -> bool:
            found[:] = httpx.get(f"{url}/slots").json()
            return found[0]["is_processing"]

        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60):
            wait_until(processing)
        assert [each["id"] for each in found] == [0, 1, 2] and found[0]["n_ctx"] == 2048
        assert [each["is_processing"] for each in found] == [True, False, False]
        said = found[0]["next_token"]
        assert said["n_decoded"] + said["n_remain"] == 1900 and found[0]["n_prompt_tokens"] == 4
        wait_until(lambda: server.front.service.idle)
        assert not any(each["is_processing"] for each in httpx.get(f"{url}/slots?fail_on_no_slot=1").json())

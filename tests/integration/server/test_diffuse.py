"""Canvases in a server, beside others: each is what it would be alone, and streams what can no longer change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from decodery.cli.chat import Conversation
from decodery.core.errors import PromptError
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.testing import tiny_transformer
from diffusing import named
from serving import VOCAB, client, serving, tiny_lm
from tiny_models import make_tokenizer


def denoising() -> LLM:
    lm = tiny_lm()
    base = tiny_transformer(1, vocab_size=VOCAB + 1, max_positions=2048)
    model = Transformer(replace(base.config, causal=False, mask_id=VOCAB), base.weights)
    return LLM(
        LoadedModel(model, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), lm.chat_template, "tiny", "float64")
    )


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LLM, Any]]:
    lm = denoising()
    with serving(lm) as (_, url):
        yield lm, client(url)


HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def canvas(spec: str, **more: Any) -> dict[str, Any]:
    return {"decodery": {"diffuse": spec, **more}}


def test_answers_are_those_of_canvases_alone(served: tuple[LLM, Any]) -> None:
    lm, api = served
    for spec, temperature in (("static", 0.0), ("threshold:tau=0.01,block=8,cache=dual", 0.8)):
        told = api.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=16, n=2, temperature=temperature, seed=5, extra_body=canvas(spec)
        )
        alone = lm.diffuse(HELLO, spec, n=2, max_new_tokens=16, temperature=temperature, seed=5)
        assert isinstance(alone, list)
        assert [each.message.content for each in told.choices] == [each.text for each in alone]
        assert [each.finish_reason for each in told.choices] == [each.finish_reason for each in alone]
        assert told.usage.completion_tokens == sum(len(each.tokens) for each in alone)
    plain = api.completions.create(model="tiny", prompt="Hello", max_tokens=12, extra_body=canvas("static"))
    assert plain.choices[0].text == lm.diffuse("Hello", "static", apply_chat_template=False, max_new_tokens=12).text  # type: ignore[union-attr]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    held = api.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, response_format=schema, extra_body=canvas("static")
    )
    assert isinstance(json.loads(held.choices[0].message.content), bool)


def test_a_stream_tells_what_is_settled_and_nothing_is_taken_back(served: tuple[LLM, Any]) -> None:
    lm, api = served
    for spec in ("static:block=4", "static", "dystruct"):
        chunks = [
            each.choices[0].delta.content or ""
            for each in api.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=16, stream=True, extra_body=canvas(spec)
            )
        ]
        whole = lm.diffuse(HELLO, spec, max_new_tokens=16)
        assert "".join(chunks) == whole.text  # type: ignore[union-attr]
        if spec == "static:block=4":
            assert sum(bool(chunk) for chunk in chunks) >= 4


def test_a_stream_shows_the_canvas_as_it_fills(served: tuple[LLM, Any]) -> None:
    lm, api = served
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "stream": True}
    body = {"decodery": {"diffuse": "static", "trace": "steps"}}
    cells: dict[int, str | None] = {}
    sizes = []
    for chunk in api.completions.create(**asked, extra_body=body):
        cells |= dict((chunk.choices[0].model_extra or {}).get("decodery", {}).get("canvas", []))
        sizes.append(len(cells))
    whole = lm.diffuse("Hello", "static", apply_chat_template=False, max_new_tokens=12)
    known = [lm.tokenizer.piece(token) for token in whole.tokens]  # type: ignore[union-attr]
    shown = [cells[at] or "" for at in range(len(known))]
    assert [each if each.startswith("bytes:") else each.encode() for each in shown] == [
        piece if piece.isascii() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece) for piece in known
    ]
    assert len(set(sizes)) > 2, "places are filled one after the other"


def test_time_that_runs_out_leaves_what_is_settled() -> None:
    """The reason is not that of a text which has its length, and a stream says the same."""
    lm = denoising()
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 600,
        "temperature": 1.0,
        "extra_body": canvas("static:block=1,eos=never"),
    }
    with serving(lm, seconds=0.6) as (_, url):
        choice = client(url).chat.completions.create(**asked).choices[0]
        chunks = list(client(url).chat.completions.create(**asked, stream=True))
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "cancelled"
    texts = [choice.message.content or "", "".join(each.choices[0].delta.content or "" for each in chunks)]
    shorter, longer = sorted((text.rstrip("\ufffd") for text in texts), key=len)
    # Both are the beginning of one and the same canvas, out of which nothing is missing.
    assert shorter and longer.startswith(shorter) and len(longer) < 600


def test_a_conversation_shows_what_is_settled_and_goes_on_with_it() -> None:
    """In `decodery chat`; a turn that is refused leaves no trace."""
    conversation = Conversation(lm := denoising(), {"max_new_tokens": 16, "diffuse": named("static:block=4")})
    pieces: list[str] = []
    first = conversation.say("Hello", pieces.append)
    assert first.tokens == lm.diffuse(HELLO, "static:block=4", max_new_tokens=16).tokens  # type: ignore[union-attr]
    assert "".join(pieces) == first.text and sum(map(bool, pieces)) >= 4
    messages = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = conversation.say("And then?", lambda piece: None)
    assert second.text == lm.diffuse(messages, "static:block=4", max_new_tokens=16).text  # type: ignore[union-attr]
    kept = list(conversation.messages)
    with pytest.raises(PromptError, match="context"):
        conversation.say("tide " * 2000, lambda piece: None)
    assert conversation.messages == kept and len(kept) == 4


def test_what_a_canvas_has_no_use_for_is_refused(served: tuple[LLM, Any]) -> None:
    _, api = served

    def refused(extra: dict[str, Any], **settings: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra, **{"max_tokens": 8} | settings)
        return str(caught.value)

    assert "leave out top_p" in refused(canvas("static"), top_p=0.5, temperature=1.0)
    assert "leave out search" in refused(canvas("static", search="beam"))
    assert "above 0 and up to 1" in refused(canvas("threshold:tau=2"))
    assert "do not divide" in refused(canvas("static:block=3"))
    assert "diffuse" in refused({})
    assert "64" in refused(canvas("lave:top=1000"))
    assert "learn2pd" in refused(canvas("learn2pd:filter=/etc/passwd")) or "file" in refused(
        canvas("learn2pd:filter=x")
    )

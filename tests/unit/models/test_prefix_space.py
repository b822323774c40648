"""Tokenizers that put a space before a text: what goes on from a prompt keeps its own first space."""

from __future__ import annotations

import re

import pytest

from decodery.constraints import Choice, Regex
from prefixed import prefixed_lm

LM = prefixed_lm()
PROMPT = "The cache keeps"
(THEIR,) = LM.tokenizer.encode("their", special=False)


def test_the_first_space_of_a_continuation_is_written() -> None:
    assert LM.tokenizer.decode([THEIR]) == "their"
    out = LM.generate(PROMPT, apply_chat_template=False, max_new_tokens=1, logit_bias={THEIR: 1e4}, drafter=None)
    assert (out.tokens, out.text) == ([THEIR], " their")
    assert PROMPT + out.text == LM.tokenizer.decode([*out.prompt_tokens, *out.tokens])
    pieces = LM.stream(PROMPT, apply_chat_template=False, max_new_tokens=2, logit_bias={THEIR: 1e4}, drafter=None)
    assert "".join(piece.text for piece in pieces) == " their their"


def test_a_text_with_nothing_before_it_begins_without_a_space() -> None:
    request = LM.request([LM.tokenizer.bos_id], max_new_tokens=2, logit_bias={THEIR: 1e4}, drafter=None)
    engine = LM.engine()
    seq = engine.submit(request)
    engine.run([seq])
    assert seq.text is not None and seq.text.text == "their their"


@pytest.mark.parametrize("seed", range(3))
def test_constraints_and_text_are_of_one_view(seed: int) -> None:
    out = LM.generate(
        PROMPT, apply_chat_template=False, constraint=Regex(" [a-z]{4}"), temperature=1.0, seed=seed, max_new_tokens=32
    )
    assert out.finish_reason == "stop" and re.fullmatch(" [a-z]{4}", out.text)
    out = LM.generate(PROMPT, apply_chat_template=False, constraint=Choice((" yes", " no")), temperature=1.0, seed=seed)
    assert out.text in (" yes", " no")


def test_a_stop_string_may_begin_with_the_first_space() -> None:
    out = LM.generate(
        PROMPT, apply_chat_template=False, max_new_tokens=4, stop=" their", logit_bias={THEIR: 1e4}, drafter=None
    )
    assert (out.text, out.stopped_by, len(out.tokens)) == ("", " their", 1)


def test_a_text_after_another_one_comes_back_to_its_tokens() -> None:
    tokenizer = LM.tokenizer
    assert tokenizer.encode_after(" their") == [THEIR] == tokenizer.encode("their", special=False)
    assert tokenizer.encode_after("their") != [THEIR]
    (none,) = tokenizer.encode_all_after([""])
    assert none == []
    for text in (" their yes", "their no", "é.", "  The"):
        assert tokenizer.decode([*tokenizer.encode("The"), *tokenizer.encode_after(text)]) == "The" + text


def test_messages_hidden_behind_a_space_come_back() -> None:
    settings = {
        "search": "coupling:temperature=2,bits=1",
        "apply_chat_template": False,
        "max_new_tokens": 200,
        "seed": 3,
    }
    out = LM.stego_encode(PROMPT, "k", **settings)
    assert LM.stego_decode(PROMPT, out.text, 1, **settings).message == b"k"

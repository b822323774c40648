"""A search that the operator of a server sets: a drop-in endpoint for clients that know nothing of it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.scorers import TextScore
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search import BestOfN, SelfConsistency
from decodery.server.served import ModelSource
from decodery.server.settings import ServerSettings
from serving import client, serving, tiny_lm, user

BEST = BestOfN(TextScore(lambda text: sum(map(ord, text)) % 97), n=4)


def test_a_stock_client_gets_the_texts_that_the_search_finds() -> None:
    lm = tiny_lm()
    asked: dict[str, Any] = {"model": "tiny", "messages": user("Is it so?"), "seed": 5, "max_tokens": 8}
    with serving(lm, search=BEST) as (_, url), client(url) as api:
        expected = lm.search("Is it so?", BEST, temperature=1.0, seed=5, max_new_tokens=8)
        assert len({out.text for out in expected}) == 4
        found = api.chat.completions.create(temperature=1.0, n=2, **asked)
        assert [choice.message.content for choice in found.choices] == [out.text for out in expected[:2]]
        pieces = api.chat.completions.create(temperature=1.0, stream=True, **asked)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == expected[0].text != lm.generate("Is it so?", temperature=1.0, seed=5, max_new_tokens=8).text
        # Without a temperature it is OpenAI's: a search without chance would find one text.
        assert api.chat.completions.create(**asked).choices[0].message.content == expected[0].text
        plain = api.completions.create(model="tiny", prompt="It is", temperature=1.0, seed=5, max_tokens=8)
        alone = lm.search("It is", BEST, temperature=1.0, seed=5, max_new_tokens=8, apply_chat_template=False)
        assert plain.choices[0].text == alone[0].text
        with pytest.raises(openai.BadRequestError, match="this server has a search of its own"):
            api.chat.completions.create(extra_body={"decodery": {"search": "beam:width=2"}}, **asked)


def test_a_search_of_more_texts_than_a_request_may_have_is_refused_at_the_start() -> None:
    with pytest.raises(SettingsError, match="follows 9 texts at a time, and a request may have 8"):
        ServerSettings(search=SelfConsistency(n=9), max_texts=8)


def test_a_search_is_checked_against_every_model_that_is_served() -> None:
    lm = tiny_lm()
    zeros = torch.zeros(lm.model.config.hidden_size, dtype=torch.float32, device="cpu")
    search = BestOfN(ValueHead(LinearValue(zeros, zeros.sum(), 1)), n=2)
    wide = ModelSource("wide", lambda: 0, lambda: tiny_lm(hidden_size=2 * len(zeros)))
    asked: dict[str, Any] = {"messages": user("Is it so?"), "max_tokens": 2, "temperature": 1.0}
    with serving(lm, [wide], search=search) as (_, url), client(url) as api:
        assert api.chat.completions.create(model="tiny", **asked).choices
        with pytest.raises(openai.APIStatusError, match="this value head reads") as failed:
            api.chat.completions.create(model="wide", **asked)
        assert failed.value.status_code == 503
    with pytest.raises(SettingsError, match="this value head reads"), serving(wide.load(), search=search):
        pass

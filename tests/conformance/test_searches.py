"""Every registered search keeps the law of searches, on its own and through a loaded model."""

from __future__ import annotations

from typing import Any

import pytest

from covering import in_turn
from decodery.core.errors import SettingsError
from decodery.core.registry import methods
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.batch import Batch, Scores
from decodery.sampling.sampler import Sampler
from decodery.search.base import Branches, Search, choose
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.testing import LawBroken, check_search, decode, tiny_transformer, to_int8
from decodery.testing.models import Counted
from methods import CHOOSING, DRAWING, LOSSY_RULES, PIPELINES, SAMPLERS, SEARCHES, WRITTEN_BY_THE_LOOP

MODEL = to_int8(tiny_transformer(3))
PROMPTS = {"one token": [11], "many": [5] * 6 + [7, 8, 9] * 4}


def test_the_list_names_every_registered_search() -> None:
    assert {*SEARCHES, *PIPELINES, "cheatsheet", "query-ttt"} == {method.name for method in methods("search")}


@pytest.mark.parametrize(("name", "prompt"), in_turn(list(SEARCHES), list(PROMPTS)))
def test_searches_keep_the_law(name: str, prompt: str) -> None:
    sampler = SAMPLERS["plain" if name in DRAWING else "greedy"]
    check_search(MODEL, [PROMPTS[prompt]], SEARCHES[name], max_new_tokens=10, eos_ids=(0, 3, 9), sampler=sampler)


class _Spread(Counted):
    """Counts the texts that a pass reads from."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.most = 0

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        self.most = max(self.most, len(batch.segments))
        return super().forward(batch, **settings)


@pytest.mark.parametrize("name", SEARCHES)
def test_passes_of_few_rows_find_the_same_and_searches_say_how_many_texts_they_follow(name: str) -> None:
    sampler = SAMPLERS["plain" if name in DRAWING else "greedy"]
    request = Request(
        PROMPTS["many"], sampler=sampler, eos_ids=(0, 3, 9), max_new_tokens=60 if name == "coupling" else 10
    )
    search, wide, narrow = SEARCHES[name], _Spread(), _Spread()
    expected = search.run(Engine(wide), request)
    found = search.run(Engine(narrow, limits=Limits(rows=2)), request)
    assert [(seq.generated, seq.score) for seq in found] == [(seq.generated, seq.score) for seq in expected]
    assert wide.most <= search.texts_at_once
    # What is asked for in one piece is read in one pass: siblings of a tree, an answer that is judged.
    whole = ("best-of-n", "compute-optimal", "contrastive-search", "edge", "exact-extract", "pg-td")
    assert max(narrow.rows) <= 2 or name in whole


@pytest.mark.parametrize("name", sorted(SEARCHES.keys() - WRITTEN_BY_THE_LOOP))
def test_what_would_have_no_effect_or_no_meaning_is_refused(name: str) -> None:
    for settings, message in (
        ({"drafter": PromptLookup()}, "leave the drafter out"),
        ({"acceptance_rule": LOSSY_RULES["tolerance"]}, "leave the acceptance rule out"),
        ({"draft_length": Fixed(nodes=2)}, "leave the draft length policy out"),
        ({"sampler": CHOOSING["momentum"]}, "leave one of the two out"),
    ):
        with pytest.raises(SettingsError, match=message):
            drawing = {"sampler": SAMPLERS["plain"]} if name in DRAWING else {}
            SEARCHES[name].run(Engine(MODEL), Request([1, 2], eos_ids=(0,), **drawing | settings))


class _Sharing(Search):
    """Wrong on purpose: its branches are not forked, so that one writes into the other's cache."""

    def find(self, engine, request, progress=None) -> ForwardCoroutine[list[Sequence]]:
        found = yield from SEARCHES["beam"].find(engine, request)
        pages = found[0].cache.pages
        pages.put(2, pages.read(2, 3) + 1e-3)
        return found


class _Unsorted(Search):
    """Wrong on purpose: the best comes last."""

    def find(self, engine, request, progress=None) -> ForwardCoroutine[list[Sequence]]:
        return (yield from SEARCHES["beam"].find(engine, request))[::-1]


class _Drawn(Search):
    """An own search as its author first writes it: it draws each token by the request's sampler."""

    def find(self, engine, request, progress=None) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        seq = branches.root
        while not seq.finished:
            logits = yield from branches.score([seq])
            rows = seq.request.sampler.law(logits, [seq.context()])
            choose(seq, int(seq.request.sampler.pick(rows, seq.request.seed, [seq.position])[0]), logits[0])
        return branches.finish([seq])


def test_an_own_search_draws_at_any_temperature() -> None:
    for temperature in (0.0, 1.0):
        settings = {
            "max_new_tokens": 10,
            "eos_ids": (0, 3, 9),
            "sampler": Sampler.from_settings(temperature=temperature),
        }
        (plain,) = decode(MODEL, [PROMPTS["many"]], **settings)
        (found,) = _Drawn().run(Engine(MODEL), Request(PROMPTS["many"], **settings))
        assert found.generated == plain.generated
    # What draws nothing still says so.
    with pytest.raises(SettingsError, match="temperature 0"):
        SEARCHES["beam"].run(Engine(MODEL), Request(PROMPTS["many"], **settings))


@pytest.mark.parametrize(("search", "message"), [(_Sharing(), "fresh prefill"), (_Unsorted(), "not in the order")])
def test_wrong_searches_are_caught(search: Search, message: str) -> None:
    with pytest.raises(LawBroken, match=message):
        check_search(MODEL, [PROMPTS["many"]], search, max_new_tokens=10, eos_ids=(0, 3, 9))


def test_the_list_of_searches_says_of_each_what_it_needs_itself() -> None:
    said = {method.name: method.requirements for method in methods("search")}
    assert "temperature 0" in said["beam"] and "passes without drafts" in said["beam"]
    # What is drawn by the loop takes any temperature and any drafter.
    for name in ("best-of-n", "weighted-vote", "adaptive-sampling", "iad"):
        assert not {"temperature 0", "passes without drafts", "rows scored one by one"} & set(said[name])

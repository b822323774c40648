"""Texts whose thinking has a budget, and that vote by what a head says of them."""

from __future__ import annotations

import pytest

from decodery.errors import SettingsError
from decodery.sample import Sampler
from decodery.search.best_of_n import BestOfN
from decodery.search.edge import Edge, _begun
from decodery.search.weighted_vote import WeightedVote
from decodery.testing import decode
from methods import DRAFTERS, Even
from sampled import MODEL, OTHER, PROMPT, plain, run, told

NOT_SEEN = 63, 62


def test_without_a_budget_it_is_a_weighted_vote_or_best_of_n() -> None:
    for most in (None, 100):
        edge = Edge(Even(), n=4, most=most, end=NOT_SEEN, answer="number")
        assert told(run(edge)) == told(run(WeightedVote(Even(), n=4, answer="number")))
    assert told(run(Edge(Even(), n=4, most=None, choose="best"))) == told(run(BestOfN(Even(), n=4)))


@pytest.mark.parametrize("drafter", [None, "draft-model"])
def test_thinking_ends_where_its_budget_does(drafter: str | None) -> None:
    settings = {"eos_ids": (), "drafter": None if drafter is None else DRAFTERS[drafter](OTHER)}
    edge = Edge(Even(), n=4, most=5, end=NOT_SEEN, cue=(6,), choose="best")
    found = run(edge, **settings)
    # Which is not where it would have ended, nor a text that is cut there.
    assert sorted(seq.generated[:8] for seq in found) == sorted([*text[:5], 63, 62, 6] for text in plain(4, eos_ids=()))
    assert all(len(seq.generated) == 12 for seq in found)
    assert found[0].trace.ledger.counts["forced"] == 4 * 3 and found[0].trace.ledger.tokens == 4 * 12
    greedy = {"sampler": Sampler.from_settings(), **settings}
    (text,) = {tuple(seq.generated) for seq in run(edge, **greedy)}
    thought = plain(1, eos_ids=(), sampler=greedy["sampler"])[0][:5]
    (after,) = decode(MODEL, [[*PROMPT, *thought, 63, 62, 6]], max_new_tokens=4)
    assert list(text) == [*thought, 63, 62, 6, *after.generated]
    # A mark that the model writes itself is not written twice, and one that it has begun is completed.
    own = Edge(Even(), n=1, most=8, end=tuple(thought[2:4]), choose="best")
    assert run(own, **greedy)[0].generated == plain(1, eos_ids=(), sampler=greedy["sampler"])[0]
    half = Edge(Even(), n=1, most=5, end=(thought[4], 63), choose="best")
    assert run(half, **greedy)[0].generated[:6] == [*thought, 63]
    assert [_begun([1, 2, 1], [1, 2, 1, 3]), _begun([1, 2, 2], [1, 2, 1, 3]), _begun([], [1])] == [3, 0, 0]


def test_what_it_cannot_do_is_named() -> None:
    for make, named in (
        (lambda: Edge(Even(), most=0), "most of at least 1"),
        (lambda: Edge(Even(), end=""), "the mark that ends thinking"),
        (lambda: run(Edge(Even())), "token ids, or search through `LM`"),
    ):
        with pytest.raises(SettingsError, match=named):
            make()

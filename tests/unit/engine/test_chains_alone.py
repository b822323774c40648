"""Models whose rows may not branch: drafts come as chains, texts stay the same, and what needs branches is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from covering import DEEP, in_turn
from decodery.core.errors import UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.dola import DoLa
from decodery.logits_sources.guidance import Guidance
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.protocol import Capabilities
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence
from decodery.testing import check_distribution, decode, tiny_transformer, to_int8
from methods import DRAFTERS, GROWTHS, KINDS, LOSSY_RULES, RULES, SAMPLERS, SEARCHES, SOURCES
from sharp import Sharp

PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
OTHER = tiny_transformer(0, num_layers=1)
IN_BRANCHES = {"hidden-transfer", "lexical-unit", "ppd", "swift"}
"""Drafters that put rows after every node of a draft, or grow trees with the layers of the model itself."""


def assert_chains(batch: Batch) -> None:
    for segment in batch.segments:
        n, stays = len(segment), segment.retained
        assert segment.mask is None or (segment.mask == np.tri(n, stays + n, stays, dtype=bool)).all()


class ChainTransformer(Transformer):
    """Fails where rows branch."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return replace(super().capabilities, trees=False)

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        assert_chains(batch)
        return super().forward(batch, **settings)


class ChainTable(Sharp):
    """Fails where rows branch."""

    def __init__(self, *law: float) -> None:
        super().__init__(*law)
        self.capabilities = replace(self.capabilities, trees=False)

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        assert_chains(batch)
        return super().forward(batch, **settings)


WHOLE = to_int8(tiny_transformer(0))
TARGET = ChainTransformer(WHOLE.config, WHOLE.weights)
SMALL = ChainTransformer(OTHER.config, OTHER.weights)


@cache
def _plain(sampler: str) -> list[list[int]]:
    return _tokens(decode(WHOLE, PROMPTS, sampler=SAMPLERS[sampler], max_new_tokens=14))


def _tokens(texts: list[Sequence]) -> list[list[int]]:
    return [list(text.tokens) for text in texts]


@pytest.mark.parametrize(("name", "sampler"), in_turn(sorted({*KINDS, *IN_BRANCHES}), ("greedy", "plain")))
def test_every_drafter_keeps_to_chains_and_to_the_text_or_is_refused(name: str, sampler: str) -> None:
    drafter = DRAFTERS[name](OTHER)
    if name in IN_BRANCHES:
        with pytest.raises(UnsupportedModel, match=f"{name} needs rows that branch, which ChainTransformer does not"):
            decode(TARGET, PROMPTS, drafter=drafter)
        return
    found = decode(TARGET, PROMPTS, drafter=drafter, sampler=SAMPLERS[sampler], max_new_tokens=14)
    assert _tokens(found) == _plain(sampler)


@pytest.mark.parametrize("growth", GROWTHS)
def test_grown_trees_are_cut_to_chains_and_never_grown_by_a_draft_model_of_chains(growth: str) -> None:
    found = decode(TARGET, PROMPTS, drafter=DraftModel(OTHER, tree_policy=GROWTHS[growth]), max_new_tokens=14)
    assert _tokens(found) == _plain("greedy")
    assert max(step.nodes for text in found for step in text.trace.steps) > 0
    with pytest.raises(UnsupportedModel, match="the draft model reads no rows that branch, as trees do: leave"):
        decode(TARGET, PROMPTS, drafter=DraftModel(SMALL, tree_policy=GROWTHS[growth]))


@pytest.mark.parametrize(("growth", "rule"), [("specinfer", "k-seq"), ("rsd-s", "recursive-rejection")])
def test_the_first_draws_alone_leave_the_law_as_it_is(growth: str, rule: str) -> None:
    target, other = ChainTable(0.3, 0.6, 0.1), Sharp(0.6, 0.3, 0.1)
    drafter = DraftModel(other, tree_policy=GROWTHS[growth])
    check_distribution(
        target,
        [1, 2],
        drafter=drafter,
        acceptance_rule=RULES[rule],
        sampler=SAMPLERS["plain"],
        length=4,
        draws=20_000 if DEEP else 100,
    )


@pytest.mark.parametrize("source", [Guidance(scale=1.7, negative=(9, 8, 7)), DoLa(layers=(0, 1))])
def test_what_a_source_makes_of_chains_is_chains(source: Any) -> None:
    expected = decode(WHOLE, PROMPTS, logits_source=source, max_new_tokens=12)
    found = decode(TARGET, PROMPTS, logits_source=source, drafter="token-recycling", max_new_tokens=12)
    assert _tokens(found) == _tokens(expected)


@pytest.mark.parametrize("name", ["adadec", "cntp"])
def test_rules_that_read_several_continuations_are_refused(name: str) -> None:
    sampler = SAMPLERS["plain" if LOSSY_RULES[name].requirements.chance else "greedy"]
    with pytest.raises(UnsupportedModel, match=f"the acceptance rule {name} needs rows that branch"):
        decode(TARGET, PROMPTS, acceptance_rule=LOSSY_RULES[name], sampler=sampler)


@pytest.mark.parametrize("name", ["exact-extract", "contrastive-search"])
def test_searches_that_read_siblings_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"the search {name} needs rows that branch"):
        Engine(TARGET).open(Request([1], search=SEARCHES[name]))


def test_values_of_candidates_need_branches() -> None:
    with pytest.raises(UnsupportedModel, match="the logits source controlled-decoding needs rows that branch"):
        decode(TARGET, PROMPTS, logits_source=SOURCES["controlled-decoding"](OTHER))


def test_a_source_does_not_stand_between_a_rule_and_the_branches_of_its_model() -> None:
    rule = LOSSY_RULES["adadec"]
    decode(
        WHOLE, [PROMPTS[0]], acceptance_rule=rule, logits_source=Guidance(scale=1.7, negative=(9, 8)), max_new_tokens=4
    )


def test_an_unnoticed_branch_would_fail_here() -> None:
    tree = DraftTree.from_paths(1, [(2,), (3,)])
    cache = TARGET.new_cache()
    with pytest.raises(AssertionError):
        TARGET.forward(Batch([Segment(tree.depths, tree.tokens, mask=tree.ancestor_mask(), cache=cache)]))

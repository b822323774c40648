"""Drafters made of others: what retrieval and a draft model make together."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import decodery.speculative.drafters
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.speculative.drafters.combine import Cascade, Router, Union
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.graft import Graft
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.rasd import RASD
from decodery.speculative.drafters.rest import REST
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.speculative.stores.datastore import Datastore
from decodery.speculative.tree_building.layers import grow_layers
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.step.forward_request import ForwardCoroutine, as_coroutine, run_sync
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.testing import TableModel, check_identical, decode, tiny_transformer, to_int8
from narrow import Narrow

TARGET = to_int8(tiny_transformer(0))


OTHER = tiny_transformer(0, num_layers=1)


PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, list(range(2, 40))]


HOT = Sampler.from_settings(temperature=0.8)


def sequence(tokens: Ordered[int], memory: Memory) -> Sequence:
    engine = Engine(TARGET, memory=memory)
    return engine.submit(Request(list(tokens)))


def test_expansion_gives_the_draft_models_own_distributions() -> None:
    drafter = DraftModel(OTHER)
    sampler = Sampler.from_settings(temperature=0.7, top_k=9)
    engine = Engine(TARGET)
    seq = engine.submit(Request(PROMPTS[1], sampler=sampler, drafter=drafter, max_new_tokens=9))
    for _ in range(3):
        tree = DraftTree.from_paths(seq.last_token, [(4, 5, 6), (4, 7), (8,)])
        nodes = [4, 0, 2, 5]
        found = run_sync(drafter.expand(seq, tree, nodes))
        for row, node in zip(found, nodes, strict=True):
            text = [*seq.tokens, *tree.tokens[tree.path(node)].tolist()]
            fresh = OTHER.forward(Batch([Segment.chunk(text, OTHER.new_cache(), logit_rows=[len(text) - 1])])).logits
            law = sampler.law(fresh, [seq.context()]).log_softmax(dim=-1)[0]
            assert torch.allclose(row, law, atol=1e-5)
        engine.step()


@dataclass(frozen=True)
class Noise(TreeDrafter):
    """Expects anything."""

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(seq.tokens) + len(tree))
        return torch.randn(len(nodes), seq.request.vocab_size, generator=generator)


NOWHERE = Datastore.build([[60, 61, 62]], separator=0, vocab_size=64)


def test_hybrids_live_with_noise_on_either_side() -> None:
    for drafter in (RASD(Noise()), Graft(Noise()), Union((Narrow(TokenRecycling(), 5, 5), REST(NOWHERE)))):
        check_identical(TARGET, PROMPTS[:2], drafter=drafter, sampler=HOT, seeds=(0,), max_new_tokens=16)


@dataclass(frozen=True)
class Watched(Composite):
    """Keeps the trees of another drafter."""

    inner: Drafter
    trees: list[DraftTree]

    __hash__ = object.__hash__

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.inner,)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        self.trees.append((yield from as_coroutine(self.inner.propose(seq, budget))))
        return self.trees[-1]


@dataclass(frozen=True)
class Dense(DraftModel):
    """The draft model's tree alone."""

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        layers = yield from grow_layers(self, seq, width=4, depth=min(3, budget.depth))
        return layers.kept(min(16, budget.nodes))


def trees_of(drafter: Drafter) -> list[DraftTree]:
    trees: list[DraftTree] = []
    decode(TARGET, PROMPTS, drafter=Watched(drafter, trees), together=False)
    return trees


def test_graft_without_pruning_is_the_plain_tree() -> None:
    settings = {"width": 4, "depth": 3, "nodes": 16, "kept": (3, 6, 10)}
    never = trees_of(Graft(DraftModel(OTHER), thresholds=(0.0, 0.0, 0.0), **settings))
    plain = trees_of(Dense(OTHER))
    assert len(never) == len(plain) > 10
    for a, b in zip(never, plain, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist()


def test_graft_that_always_prunes_stays_at_the_root_and_fills_its_budget() -> None:
    trees = trees_of(Graft(DraftModel(OTHER), thresholds=(1.1, 0, 0), width=4, depth=3, nodes=16, kept=(3, 6, 10)))
    late = [tree for tree in trees if tree.depths.max() > 1]
    assert late, "nothing was retrieved"
    for tree in trees:
        tree.validate()
        assert len(tree) <= 17
        # Of the drafter only the first level is there, in the places before the retrieved ones.
        assert (tree.parents[1:4] == 0).all()
    assert max(len(tree) for tree in trees) == 17


def test_rasd_keeps_what_both_sides_find() -> None:
    trees = trees_of(RASD(DraftModel(OTHER), width=3, depth=2, retrieved=6, nodes=16, candidates=64))
    copies = trees_of(PromptLookup(length=3, pick="last"))
    assert all(len(tree) <= 17 for tree in trees)
    assert len(trees) < len(copies), "a text that repeats itself is guessed better with a draft model beside it"
    none = trees_of(RASD(DraftModel(OTHER), width=3, depth=2, retrieved=6, nodes=16, candidates=1, trusted=99))
    assert all(np.bincount(tree.parents[1:] + 0, minlength=1)[0] <= 4 for tree in none if len(tree) > 1)


@dataclass(frozen=True)
class Mute(Noise):
    """Has a word for the first tokens of the vocabulary only, as small drafts do for common ones."""

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        logits = super().logits(seq, tree, nodes)
        logits[:, 8:] = -torch.inf
        return logits


class Reciting(TableModel):
    """Repeats one passage for ever, half of it in words the draft does not have."""

    def logits(self, tokens: Ordered[int]) -> torch.Tensor:
        row = torch.zeros(self.vocab_size, dtype=torch.float64)
        row[PASSAGE[len(tokens) % len(PASSAGE)]] = 20.0
        return row


PASSAGE = [1, 20, 2, 21, 22, 3, 23, 4, 24, 1, 25, 26, 5, 20, 27]


@pytest.mark.parametrize("trusted", [1, 99])
def test_rasd_is_no_worse_than_a_plain_fusion_of_its_parts(trusted: int) -> None:
    model, prompt = Reciting(32), [*PASSAGE, *PASSAGE[:4]]
    rasd = RASD(Mute(), width=4, depth=3, retrieved=6, nodes=16, trusted=trusted)
    plain = Union((PromptLookup(length=6), Mute(tree_policy=EAGLE2(nodes=10, width=4, depth=3))))
    rates, rows = [], []
    for drafter in (rasd, plain):
        (seq,) = decode(model, [prompt], drafter=drafter, max_new_tokens=60)
        rates.append(seq.trace.tokens_per_pass)
        rows.append(seq.trace.rows / seq.trace.passes)
    assert abs(rows[0] - rows[1]) < 1.5
    # What the draft has a word for, it may still judge wrongly where a match is not trusted.
    assert rates[0] >= rates[1] if trusted == 1 else rates[0] > 1.5


def test_combinations_speak_in_turn() -> None:
    text = [1, 2, 3, 9, 1, 2, 3]
    names = {"union": Union, "cascade": Cascade, "router": Router}
    for name, kind in names.items():
        assert isinstance(resolve("drafter", f"{name}:drafters=suffix-automaton/token-recycling"), kind)
    copy, other = CopySpec(gamma=3, length=2), PromptLookup(max_ngram=1, length=1, pick="first")

    def drafted(drafter: Drafter, tokens: list[int]) -> list[int]:
        seq = sequence(tokens, Memory())
        seq.states[drafter] = drafter.start(seq)
        return run_sync(drafter.propose(seq, Budget(64, 64))).tokens[1:].tolist()

    assert drafted(decodery.speculative.drafters.cascade(copy, other), text) == [9, 1]
    assert drafted(decodery.speculative.drafters.cascade(copy, other), [1, 2, 1]) == [2]
    assert drafted(decodery.speculative.drafters.router(copy, other, match=3), text) == [9, 1]
    assert drafted(decodery.speculative.drafters.router(copy, other, match=4), text) == [9]
    assert drafted(decodery.speculative.drafters.router(copy, other, choose=lambda seq: 1), text) == [9]
    both = decodery.speculative.drafters.union(CopySpec(gamma=1, length=2, pick="last"), CopySpec(gamma=1, length=2))
    assert drafted(both, [3, 4, 5, 3, 6, 7, 3]) == [6, 7, 4, 5]
    assert both.provides.drafts == ("deterministic",)
    assert decodery.speculative.drafters.cascade(copy, STAND()).provides.drafts == (
        "deterministic",
        "without-replacement",
    )
    with pytest.raises(SettingsError, match="cannot tell how long a match of PromptLookup is"):
        decodery.speculative.drafters.router(other, copy)
    with pytest.raises(SettingsError, match="at least two"):
        decodery.speculative.drafters.union(copy)


@pytest.mark.parametrize(
    "spec",
    [
        *("token-recycling:nodes=0", "aded:depth=1", "stand:orders=0/1", "copyspec:gamma=0", "suffix-tree:least=0"),
        *("suffix-automaton:factor=0", "rest:datastore=x,shortest=0"),
        *("rasd:drafter=copyspec", "graft:drafter=prompt-lookup"),
    ],
)
def test_settings_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(SettingsError):
        resolve("drafter", spec)

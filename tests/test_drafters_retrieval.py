"""Drafters that retrieve and combine: budgets, scopes of memory, hybrids, and what each draws or keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import decodery.draft
from decodery.budget.base import Budget
from decodery.core.ask import Asking, drive, settled
from decodery.core.memory import Memory
from decodery.core.sequence import Sequence
from decodery.core.tree import TokenTree
from decodery.decode.engine import Engine
from decodery.decode.request import Request
from decodery.draft.aded import ADED
from decodery.draft.base import Composite, Drafter, Expander
from decodery.draft.combine import First, Fuse, Switch
from decodery.draft.copyspec import CopySpec
from decodery.draft.draft_model import DraftModel
from decodery.draft.graft import Graft
from decodery.draft.growth.eagle_2 import EAGLE2
from decodery.draft.prompt_lookup import PromptLookup
from decodery.draft.rasd import RASD
from decodery.draft.rest import REST
from decodery.draft.shapes.best_first import grow
from decodery.draft.shapes.layers import grow_layers
from decodery.draft.shapes.monte_carlo import SearchTree
from decodery.draft.stand import STAND
from decodery.draft.stores.automaton import SuffixAutomaton as Automaton
from decodery.draft.stores.datastore import FORMAT, Datastore
from decodery.draft.stores.suffix_trie import SuffixTrie
from decodery.draft.suffix_automaton import SuffixAutomaton
from decodery.draft.suffix_tree import SuffixTree
from decodery.draft.token_recycling import TokenRecycling
from decodery.errors import SettingsError, VocabularyMismatch
from decodery.model.batch import Batch, Segment
from decodery.registry import resolve
from decodery.sample import Sampler
from decodery.testing import TableModel, check_identical, chi_square, decode, tiny_transformer
from decodery.verify.coupled import Coupled
from methods import DRAFTERS

TARGET = tiny_transformer(0)
OTHER = tiny_transformer(0, num_layers=1)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, list(range(2, 40))]
HOT = Sampler.from_settings(temperature=0.8)


@dataclass(frozen=True)
class Narrow(Composite):
    """Asks another drafter for less than the engine allows, and checks that it keeps to that."""

    inner: Drafter
    nodes: int
    depth: int

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.inner,)

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        with self.part(seq, 0) as drafter:
            tree = drive(drafter.propose(seq, Budget(nodes, depth)))
        tree.validate()
        assert tree.tokens[0] == seq.pending
        assert len(tree) <= nodes + 1 and tree.depths.max() <= depth
        assert tree.tokens.min() >= 0 and tree.tokens.max() < seq.vocab_size
        return tree


OWN = [
    *("token-recycling", "aded", "stand", "copyspec", "suffix-automaton", "suffix-tree", "rest", "rasd", "graft"),
    *("fuse", "first", "switch"),
]


@pytest.mark.parametrize("name", OWN)
def test_every_budget_is_kept(name: str) -> None:
    for nodes, depth in ((0, 0), (1, 1), (3, 1), (2, 5), (9, 3)):
        drafter = Narrow(DRAFTERS[name](OTHER), nodes, depth)
        for sampler in (Sampler.from_settings(), HOT):
            settings = {"sampler": sampler, "seeds": (0,), "max_new_tokens": 12, "tested": "nothing"}
            (run,) = check_identical(TARGET, PROMPTS[1:2], drafter=drafter, **settings)
            assert all(step.nodes <= nodes for step in run.trace.decoding)


@pytest.mark.parametrize("name", ["token-recycling", "aded", "stand", "suffix-tree", "graft"])
def test_what_the_process_remembers_changes_drafts_and_never_texts(name: str) -> None:
    settings = {"drafter": DraftModel(OTHER)} if name == "graft" else {}
    drafter = type(DRAFTERS[name](OTHER))(scope="process", **settings)
    for sampler in (None, HOT):
        check_identical(TARGET, PROMPTS, drafter=drafter, sampler=sampler, seeds=(0, 1, 0), max_new_tokens=20)


@pytest.mark.parametrize("name", ["token-recycling", "stand", "suffix-tree"])
def test_the_second_time_more_is_guessed(name: str) -> None:
    make = type(DRAFTERS[name](OTHER))
    rates = {}
    for scope in ("process", "problem", "request"):
        first, again = decode(TARGET, PROMPTS[:1], drafter=make(scope=scope), seeds=(0, 0), together=False)
        rates[scope] = (first.trace.tokens_per_pass, again.trace.tokens_per_pass)
    assert rates["process"][1] > rates["process"][0]
    assert rates["problem"] == rates["process"]
    assert rates["request"][1] == rates["request"][0] == rates["process"][0]


def sequence(tokens: Ordered[int], memory: Memory) -> Sequence:
    engine = Engine(TARGET, memory=memory)
    return engine.submit(Request(list(tokens)))


def test_memory_has_scopes_and_bounds() -> None:
    memory = Memory(problems=2)
    one, same, other, third = (sequence(prompt, memory) for prompt in ([1, 2], [1, 2], [3], [4]))

    def made(scope: str, seq: Sequence) -> int:
        return id(kept.setdefault(len(kept), memory.recall(scope, seq, "key", object)))  # type: ignore[arg-type]

    kept: dict[int, object] = {}
    assert made("request", one) != made("request", one)
    assert made("process", one) == made("process", other)
    assert made("problem", one) == made("problem", same) != made("problem", other)
    first = made("problem", one)
    made("problem", third)
    assert made("problem", one) == first, "the problem used last stays"
    made("problem", other), made("problem", third)
    assert made("problem", one) != first
    process = made("process", one)
    memory.clear()
    assert made("process", one) != process


@dataclass(frozen=True)
class RandomRows(TokenRecycling):
    """Successors that are pure noise."""

    def start(self, seq: Sequence):
        memory = super().start(seq)
        random = np.random.default_rng(0)
        memory.store.matrix[:] = [random.permutation(seq.vocab_size)[: self.width] for _ in memory.store.matrix]
        return memory

    def observe(self, seq, seen) -> None:
        pass


def test_random_successors_change_nothing() -> None:
    for sampler in (None, HOT):
        check_identical(TARGET, PROMPTS, drafter=RandomRows(), sampler=sampler)


def test_more_nodes_guess_no_less() -> None:
    def rate(nodes: int) -> float:
        runs = decode(TARGET, PROMPTS, drafter=TokenRecycling(nodes=nodes), seeds=range(3), together=False)
        return sum(run.trace.tokens for run in runs) / sum(run.trace.passes for run in runs)

    assert 1.0 < rate(1) < rate(60)


@dataclass(frozen=True)
class WithLaws(Coupled):
    """Asks for draft distributions that it does not use."""

    uses_draft_distributions: ClassVar[bool] = True


def stand_tree(seed: int, law: dict[int, float], temperature: float = 1.0) -> TokenTree:
    """One draft of STAND where the same law follows everything."""
    sampler = Sampler.from_settings(temperature=temperature)
    engine = Engine(TableModel(6))
    drafter = STAND(orders=(1,), nodes=3, scope="request")
    seq = engine.submit(Request([1], sampler=sampler, drafter=drafter, seed=seed, rule=WithLaws()))
    ids = np.full((6, 10), -1)
    weights = np.zeros((6, 10))
    ids[:, : len(law)], weights[:, : len(law)] = list(law), list(law.values())
    seq.draft_state.store.means.learn([(token,) for token in range(6)], ids, weights)
    return drive(drafter.propose(seq, Budget(3, 1)))


def test_stand_draws_children_without_replacement_from_its_law() -> None:
    law = {0: 0.2, 2: 0.4, 3: 0.1, 5: 0.1}
    total = sum(law.values())
    q = np.array([law.get(token, 0.0) for token in range(6)]) / total
    singles, pairs = np.zeros(6), np.zeros(36)
    for seed in range(2000):
        tree = stand_tree(seed, law)
        assert tree.origin == "without-replacement"
        assert torch.allclose(tree.distributions[0], torch.from_numpy(q))
        assert np.allclose(np.exp(tree.logq[1:]), q[tree.tokens[1:]])
        i, j = tree.tokens[1:3].tolist()
        singles[i] += 1
        pairs[6 * i + j] += 1
    ordered = np.array([q[i] * q[j] / (1 - q[i]) if i != j else 0.0 for i in range(6) for j in range(6)])
    assert chi_square(singles, q) > 1e-3
    assert chi_square(pairs, ordered) > 1e-3


def test_stand_follows_the_temperature_and_the_noise_of_the_request() -> None:
    law = {0: 0.2, 2: 0.4, 3: 0.1}
    cold = stand_tree(0, law, temperature=0.5).distributions[0].numpy()
    assert cold[[0, 2, 3]] == pytest.approx(np.array([0.04, 0.16, 0.01]) / 0.21, rel=1e-5)
    assert stand_tree(0, law, temperature=0.0).tokens.tolist() == [1, 2, 0, 3]
    # A store that is right guesses the very token: the target's own distributions, seen once, draw it again.
    model = TableModel(8, order=1, spread=3.0)
    first, again = decode(model, [[1, 2]], drafter=STAND(), sampler=HOT, seeds=(5, 5), together=False)
    assert again.generated == first.generated
    assert all(step.accepted == step.emitted - 1 for step in again.trace.decoding)
    assert again.trace.tokens_per_pass > 4


def test_copyspec_copies_from_the_first_place_and_what_exists() -> None:
    text = [9, 1, 2, 3, 4, 5, 1, 2, 3, 7, 1, 2, 3]
    for pick, expected in (("first", [4, 5, 1, 2, 3, 7, 1, 2, 3]), ("last", [7, 1, 2, 3])):
        seq = sequence(text, Memory())
        drafter = CopySpec(pick=pick)  # type: ignore[arg-type]
        seq.draft_state = drafter.start(seq)
        assert drive(drafter.propose(seq, Budget(64, 64))).tokens.tolist() == [3, *expected]
        assert drafter.match_length(seq) == 3


def test_the_automaton_drafts_more_after_longer_matches() -> None:
    text = [*range(30), 50, 0, 1]
    seq = sequence(text, Memory())
    drafter = SuffixAutomaton()
    seq.draft_state = drafter.start(seq)
    assert drive(drafter.propose(seq, Budget(64, 64))).tokens.tolist() == [1, *range(2, 11)]
    seq.tokens.append(2)
    assert len(drive(drafter.propose(seq, Budget(64, 64)))) - 1 == 13
    assert drafter.match_length(seq) == 3


def test_text_and_past_outputs_grow_the_same_trees() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        text = random.integers(0, 3, 40).tolist()
        own, past = Automaton(depth=8), SuffixTrie(8, 1000)
        own.extend(text)
        past.add(text)
        for length in range(1, 5):
            state = 0
            for token in text[-length:]:
                state = own.next[state][token]
            place = past.find(text[-length:])
            assert place is not None
            limits = {"nodes": 12, "depth": 8 - length, "least": 0.05}
            for branch in (True, False):
                a = grow(
                    state,
                    own.count.__getitem__,
                    lambda s, own=own: sorted((t, n) for t, n in own.next[s].items() if own.count[n]),
                    branch=branch,
                    **limits,
                )
                b = grow(
                    place,
                    past.count,
                    lambda p, past=past: sorted(past.following(p), key=lambda step: step[0]),
                    branch=branch,
                    **limits,
                )
                assert (a.tokens, a.parents) == (b.tokens, b.parents)
                assert a.score == pytest.approx(b.score)


def test_suffix_tree_takes_the_draft_that_sums_to_most() -> None:
    # After 1 2 came 3 twice and 4 once, after 9 1 2 always 4.
    text = [7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 6, 5, 9, 1, 2]
    seq = sequence(text, Memory())
    drafter = SuffixTree(branch=False)
    seq.draft_state = drafter.start(seq)
    # Three matched tokens, one of two occurrences goes on: 1/2 + 1/2 + 1/2. Two matched: 2/4 + 2/4.
    assert drive(drafter.propose(seq, Budget(64, 64))).tokens.tolist() == [2, 4, 6, 5]
    assert drafter.match_length(seq) == 3


def test_rest_drafts_the_commonest_continuations_of_the_longest_match() -> None:
    store = Datastore.build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4, 6], [2, 9]], separator=0, vocab_size=64)
    seq = sequence([8, 1, 2], Memory())
    drafter = REST(store, nodes=3)
    seq.draft_state = drafter.start(seq)
    tree = drive(drafter.propose(seq, Budget(64, 64)))
    assert {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(1, 4)} == {(3,), (3, 4), (3, 5)}
    assert drafter.match_length(seq) == 2
    seq.tokens.append(7)
    assert len(drive(drafter.propose(seq, Budget(64, 64)))) == 1


def kept_on_disk(datastore: Datastore, folder: Path) -> str:
    """The folder of a datastore, as `decodery train datastore` writes it."""
    (shard,) = datastore.shards
    np.save(folder / "00000.tokens.npy", shard.tokens)
    np.save(folder / "00000.order.npy", shard.order.astype("<u4"))
    facts = {"format": FORMAT, "shards": [len(shard.tokens)], "separator": 0, "vocab_size": datastore.vocab_size}
    (folder / "datastore.json").write_text(json.dumps(facts))
    return str(folder)


@pytest.mark.parametrize("spec", ["rest", "aded", "suffix-automaton", "rasd:drafter=ngram"])
def test_datastores_of_another_vocabulary_are_refused(spec: str, tmp_path: Path) -> None:
    folder = kept_on_disk(Datastore.build([[60, 61, 62]], separator=0, vocab_size=65), tmp_path)
    drafter = resolve("draft", f"{spec}{',' if ':' in spec else ':'}datastore={folder}")
    with pytest.raises(VocabularyMismatch, match="made for 65 tokens and the model has 64"):
        decode(TARGET, PROMPTS[:1], drafter=drafter)


def test_a_datastores_match_counts_for_less_than_the_texts_own(tmp_path: Path) -> None:
    text = [1, 2, 3, 9, 8, 1, 2, 3]
    store = kept_on_disk(Datastore.build([[8, 1, 2, 3, 7, 7]], separator=0, vocab_size=64), tmp_path)
    seq = sequence(text, Memory())

    def drafted(drafter: Drafter) -> list[int]:
        seq.draft_state = drafter.start(seq)
        return drive(drafter.propose(seq, Budget(64, 64))).tokens[1:3].tolist()

    # Three tokens of the text against four of the datastore.
    other = CopySpec(gamma=1, length=2, pick="last")
    for bias, found in ((0, [7, 7]), (1, [9, 8]), (5, [9, 8])):
        copying = SuffixAutomaton(datastore=store, bias=bias)
        assert drafted(copying) == found
        assert drafted(Switch((copying, other), match=3)) == found
    # What would not be enough to speak in a switch does not speak there for what is.
    assert drafted(Switch((SuffixAutomaton(datastore=store, bias=0), other), match=4)) == [7, 7]
    assert drafted(Switch((SuffixAutomaton(datastore=store, bias=1), other), match=4)) == [9, 8]
    # Where the text itself has nothing to say, the datastore has.
    seq.tokens[:] = [30, 31, 8, 1, 2, 3]
    assert drafted(SuffixAutomaton(datastore=store)) == [7, 7]


def test_aded_cuts_the_least_visited_of_equally_long_paths() -> None:
    drafter = ADED(nodes=6, paths=4, depth=2)
    tree = SearchTree([1])
    tree.expand(0, [(2, 1.0), (3, 1.0), (4, 1.0)])
    tree.visits = [9, 2, 5, 3]
    following = {(1, 2): [(7, 1.0)], (1, 3): [(8, 1.0)], (1, 4): [(9, 1.0)]}

    def paths(nodes: int) -> list[tuple[int, ...]]:
        return replace(drafter, nodes=nodes)._paths(tree, (0, 1), lambda *pair: following.get(pair, []))

    assert paths(6) == [(3, 8), (4, 9), (2, 7)]
    assert paths(5) == [(3, 8), (4, 9)]
    assert paths(3) == [(3, 8)]
    # Longer ones go first, however often they were visited.
    del following[1, 4], following[1, 2]
    assert paths(3) == [(4,), (2,)]


def test_expansion_gives_the_draft_models_own_distributions() -> None:
    drafter = DraftModel(OTHER)
    sampler = Sampler.from_settings(temperature=0.7, top_k=9)
    engine = Engine(TARGET)
    seq = engine.submit(Request(PROMPTS[1], sampler=sampler, drafter=drafter, max_new_tokens=9))
    for _ in range(3):
        tree = TokenTree.from_paths(seq.pending, [(4, 5, 6), (4, 7), (8,)])
        nodes = [4, 0, 2, 5]
        found = drive(drafter.expand(seq, tree, nodes))
        for row, node in zip(found, nodes, strict=True):
            text = [*seq.tokens, *tree.tokens[tree.path(node)].tolist()]
            fresh = OTHER.forward(Batch([Segment.chunk(text, OTHER.new_cache(), logit_rows=[len(text) - 1])])).logits
            law = sampler.law(fresh, [seq.context()]).log_softmax(dim=-1)[0]
            assert torch.allclose(row, law, atol=1e-5)
        engine.step()


@dataclass(frozen=True)
class Noise(Expander):
    """Expects anything."""

    def logits(self, seq: Sequence, tree: TokenTree, nodes: Ordered[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(seq.tokens) + len(tree))
        return torch.randn(len(nodes), seq.vocab_size, generator=generator)


NOWHERE = Datastore.build([[60, 61, 62]], separator=0, vocab_size=64)


def test_hybrids_live_with_noise_on_either_side() -> None:
    for drafter in (RASD(Noise()), Graft(Noise()), Fuse((Narrow(TokenRecycling(), 5, 5), REST(NOWHERE)))):
        check_identical(TARGET, PROMPTS, drafter=drafter, sampler=HOT, seeds=(0,))


@dataclass(frozen=True)
class Watched(Composite):
    """Keeps the trees of another drafter."""

    inner: Drafter
    trees: list[TokenTree]

    __hash__ = object.__hash__

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.inner,)

    def propose(self, seq: Sequence, budget: Budget) -> Asking[TokenTree]:
        with self.part(seq, 0) as drafter:
            self.trees.append((yield from settled(drafter.propose(seq, budget))))
        return self.trees[-1]


@dataclass(frozen=True)
class Dense(DraftModel):
    """The draft model's tree alone."""

    def propose(self, seq: Sequence, budget: Budget) -> Asking[TokenTree]:
        layers = yield from grow_layers(self, seq, width=4, depth=min(3, budget.depth))
        return layers.kept(min(16, budget.nodes))


def trees_of(drafter: Drafter) -> list[TokenTree]:
    trees: list[TokenTree] = []
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

    def logits(self, seq: Sequence, tree: TokenTree, nodes: Ordered[int]) -> torch.Tensor:
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
    plain = Fuse((PromptLookup(length=6), Mute(growth=EAGLE2(nodes=10, width=4, depth=3))))
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
    names = {"fuse": Fuse, "first": First, "switch": Switch}
    for name, kind in names.items():
        assert isinstance(resolve("draft", f"{name}:drafters=suffix-automaton/token-recycling"), kind)
    copy, other = CopySpec(gamma=3, length=2), PromptLookup(max_ngram=1, length=1, pick="first")

    def drafted(drafter: Drafter, tokens: list[int]) -> list[int]:
        seq = sequence(tokens, Memory())
        seq.draft_state = drafter.start(seq)
        return drive(drafter.propose(seq, Budget(64, 64))).tokens[1:].tolist()

    assert drafted(decodery.draft.first(copy, other), text) == [9, 1]
    assert drafted(decodery.draft.first(copy, other), [1, 2, 1]) == [2]
    assert drafted(decodery.draft.switch(copy, other, match=3), text) == [9, 1]
    assert drafted(decodery.draft.switch(copy, other, match=4), text) == [9]
    assert drafted(decodery.draft.switch(copy, other, choose=lambda seq: 1), text) == [9]
    both = decodery.draft.fuse(CopySpec(gamma=1, length=2, pick="last"), CopySpec(gamma=1, length=2))
    assert drafted(both, [3, 4, 5, 3, 6, 7, 3]) == [6, 7, 4, 5]
    assert both.origin == "deterministic"
    assert decodery.draft.first(copy, STAND()).origin == "without-replacement"
    with pytest.raises(SettingsError, match="cannot tell how long a match of PromptLookup is"):
        decodery.draft.switch(other, copy)
    with pytest.raises(SettingsError, match="at least two"):
        decodery.draft.fuse(copy)


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
        resolve("draft", spec)

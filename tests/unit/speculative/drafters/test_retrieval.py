"""Drafters that retrieve: budgets, scopes of memory, and what each draws or keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from covering import FULL
from decodery.core.errors import VocabularyMismatch
from decodery.core.registry import resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.output import Output
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.aded import ADED
from decodery.speculative.drafters.combine import Router
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.rest import REST
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.drafters.suffix_automaton import SuffixAutomaton
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.speculative.stores.datastore import FORMAT, Datastore
from decodery.speculative.tree_building.monte_carlo import SearchTree
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.testing import TableModel, check_identical, chi_square, decode, tiny_transformer, to_int8
from methods import DRAFTERS
from narrow import Narrow
from serving import tiny_lm

TARGET = to_int8(tiny_transformer(0))


OTHER = tiny_transformer(0, num_layers=1)


PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, list(range(2, 40))]


GREEDY, HOT = Sampler.from_settings(), Sampler.from_settings(temperature=0.8)


OWN = [
    *("token-recycling", "aded", "stand", "copyspec", "suffix-automaton", "suffix-tree", "rest", "rasd", "graft"),
    *("union", "cascade", "router"),
]


@pytest.mark.parametrize("name", OWN)
def test_every_budget_is_kept(name: str) -> None:
    for turn, (nodes, depth) in enumerate(((0, 0), (1, 1), (3, 1), (2, 5), (9, 3))):
        drafter = Narrow(DRAFTERS[name](OTHER), nodes, depth)
        # What a drafter draws from is bounded the same however tokens are chosen.
        for sampler in (GREEDY, HOT) if FULL else ((GREEDY, HOT)[turn % 2],):
            settings = {"sampler": sampler, "seeds": (0,), "max_new_tokens": 12, "tested": "nothing"}
            (run,) = check_identical(TARGET, PROMPTS[1:2], drafter=drafter, **settings)
            assert all(step.nodes <= nodes for step in run.trace.decoding)


@pytest.mark.parametrize("name", ["token-recycling", "aded", "stand", "suffix-tree", "graft"])
def test_what_the_process_remembers_changes_drafts_and_never_texts(name: str) -> None:
    settings = {"drafter": DraftModel(OTHER)} if name == "graft" else {}
    drafter = type(DRAFTERS[name](OTHER))(scope="process", **settings)
    for sampler in (None, HOT):
        check_identical(TARGET, PROMPTS[:2], drafter=drafter, sampler=sampler, seeds=(0, 1, 0), max_new_tokens=14)


@pytest.mark.parametrize("name", ["token-recycling", "stand", "suffix-tree"])
def test_the_second_time_more_is_guessed(name: str) -> None:
    make = type(DRAFTERS[name](OTHER))
    rates = {}
    for scope in ("process", "problem", "request"):
        first, again = decode(TARGET, PROMPTS[:1], drafter=make(scope=scope, nodes=16), seeds=(0, 0), together=False)
        rates[scope] = (first.trace.tokens_per_pass, again.trace.tokens_per_pass)
    assert rates["process"][1] > rates["process"][0]
    assert rates["problem"] == rates["process"]
    assert rates["request"][1] == rates["request"][0] == rates["process"][0]


@pytest.mark.parametrize("scope", ["process", "problem"])
@pytest.mark.parametrize("name", ["token-recycling", "stand", "suffix-tree"])
def test_nothing_is_drafted_from_texts_of_another_salt(name: str, scope: str) -> None:
    engine, passes = Engine(TARGET), list[int]()
    drafter = type(DRAFTERS[name](OTHER))(scope=scope, nodes=16)
    for cache_namespace in ("a", "b", "a"):
        seq = engine.submit(Request(PROMPTS[0], drafter=drafter, max_new_tokens=20, cache_namespace=cache_namespace))
        engine.run([seq])
        passes.append(seq.trace.passes)
    assert passes[1] == passes[0] > passes[2]


def test_what_is_measured_begins_with_a_fresh_memory() -> None:
    lm = tiny_lm()
    settings = {"drafter": "suffix-tree", "max_new_tokens": 40}

    def passes(**further: bool) -> int:
        output = lm.generate("tides", **settings, **further)
        assert isinstance(output, Output)
        return output.trace.passes

    cold = passes(fresh_memory=True)
    # A text with a fresh memory learns nothing and leaves nothing.
    assert passes(fresh_memory=True) == passes() == cold
    assert passes() < cold
    assert passes(fresh_memory=True) == cold
    lm.reset_memory()
    assert passes() == cold


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
        memory.store.matrix[:] = [random.permutation(seq.request.vocab_size)[: self.width] for _ in memory.store.matrix]
        return memory

    def observe(self, seq, seen) -> None:
        pass


def test_random_successors_change_nothing() -> None:
    for sampler in (None, HOT):
        check_identical(TARGET, PROMPTS[:2], drafter=RandomRows(), sampler=sampler, seeds=(0,))


def test_more_nodes_guess_no_less() -> None:
    def rate(nodes: int) -> float:
        runs = decode(TARGET, PROMPTS, drafter=TokenRecycling(nodes=nodes), seeds=range(2), together=False)
        return sum(run.trace.tokens for run in runs) / sum(run.trace.passes for run in runs)

    assert 1.0 < rate(1) < rate(60)


@dataclass(frozen=True)
class WithLaws(Coupled):
    """Asks for draft distributions that it does not use."""

    requirements = Requirements(laws=True)


def stand_tree(seed: int, law: dict[int, float], temperature: float = 1.0) -> DraftTree:
    """One draft of STAND where the same law follows everything."""
    sampler = Sampler.from_settings(temperature=temperature)
    engine = Engine(TableModel(6))
    drafter = STAND(orders=(1,), nodes=3, scope="request")
    seq = engine.submit(Request([1], sampler=sampler, drafter=drafter, seed=seed, acceptance_rule=WithLaws()))
    ids = np.full((6, 10), -1)
    weights = np.zeros((6, 10))
    ids[:, : len(law)], weights[:, : len(law)] = list(law), list(law.values())
    seq.states[seq.request.drafter].store.means.learn([(token,) for token in range(6)], ids, weights)
    return run_sync(drafter.propose(seq, Budget(3, 1)))


def test_stand_draws_children_without_replacement_from_its_law() -> None:
    law = {0: 0.2, 2: 0.4, 3: 0.1, 5: 0.1}
    total = sum(law.values())
    q = np.array([law.get(token, 0.0) for token in range(6)]) / total
    singles, pairs = np.zeros(6), np.zeros(36)
    for seed in range(800):
        tree = stand_tree(seed, law)
        assert tree.origin == "without-replacement"
        assert torch.allclose(tree.distributions[0], torch.from_numpy(q))
        assert np.allclose(np.exp(tree.logq[1:]), q[tree.tokens[1:]])
        i, j = tree.tokens[1:3].tolist()
        singles[i] += 1
        pairs[6 * i + j] += 1
    ordered = np.array([q[i] * q[j] / (1 - q[i]) if i != j else 0.0 for i in range(6) for j in range(6)])
    assert chi_square(singles, q) > 1e-3
    assert chi_square(pairs, ordered) > 1e-3 > 1e-6 > chi_square(pairs, np.outer(q, q).ravel())


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
        seq.states[drafter] = drafter.start(seq)
        assert run_sync(drafter.propose(seq, Budget(64, 64))).tokens.tolist() == [3, *expected]
        assert drafter.match_length(seq) == 3


def test_the_automaton_drafts_more_after_longer_matches() -> None:
    text = [*range(30), 50, 0, 1]
    seq = sequence(text, Memory())
    drafter = SuffixAutomaton()
    seq.states[drafter] = drafter.start(seq)
    assert run_sync(drafter.propose(seq, Budget(64, 64))).tokens.tolist() == [1, *range(2, 11)]
    seq.tokens.append(2)
    assert len(run_sync(drafter.propose(seq, Budget(64, 64)))) - 1 == 13
    assert drafter.match_length(seq) == 3


def test_rest_drafts_the_commonest_continuations_of_the_longest_match() -> None:
    store = Datastore.build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4, 6], [2, 9]], separator=0, vocab_size=64)
    seq = sequence([8, 1, 2], Memory())
    drafter = REST(store, nodes=3)
    seq.states[drafter] = drafter.start(seq)
    tree = run_sync(drafter.propose(seq, Budget(64, 64)))
    assert {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(1, 4)} == {(3,), (3, 4), (3, 5)}
    assert drafter.match_length(seq) == 2
    seq.tokens.append(7)
    assert len(run_sync(drafter.propose(seq, Budget(64, 64)))) == 1


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
    drafter = resolve("drafter", f"{spec}{',' if ':' in spec else ':'}datastore={folder}")
    with pytest.raises(VocabularyMismatch, match="made for 65 tokens and the model has 64"):
        decode(TARGET, PROMPTS[:1], drafter=drafter)


def test_a_datastores_match_counts_for_less_than_the_texts_own(tmp_path: Path) -> None:
    text = [1, 2, 3, 9, 8, 1, 2, 3]
    store = kept_on_disk(Datastore.build([[8, 1, 2, 3, 7, 7]], separator=0, vocab_size=64), tmp_path)
    seq = sequence(text, Memory())

    def drafted(drafter: Drafter) -> list[int]:
        seq.states[drafter] = drafter.start(seq)
        return run_sync(drafter.propose(seq, Budget(64, 64))).tokens[1:3].tolist()

    # Three tokens of the text against four of the datastore.
    other = CopySpec(gamma=1, length=2, pick="last")
    for bias, found in ((0, [7, 7]), (1, [9, 8]), (5, [9, 8])):
        copying = SuffixAutomaton(datastore=store, bias=bias)
        assert drafted(copying) == found
        assert drafted(Router((copying, other), match=3)) == found
    # What would not be enough to speak in a switch does not speak there for what is.
    assert drafted(Router((SuffixAutomaton(datastore=store, bias=0), other), match=4)) == [7, 7]
    assert drafted(Router((SuffixAutomaton(datastore=store, bias=1), other), match=4)) == [9, 8]
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

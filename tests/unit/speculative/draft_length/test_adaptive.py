"""Budgets that learn what pays: goodput and hardware against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.draft_length.goodput import Goodput, best_lengths
from decodery.speculative.draft_length.hardware import ChildRates, Hardware, best_size, best_tree
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer

TARGET = tiny_transformer(0)


OTHER = tiny_transformer(0, num_layers=1)


PROMPT = [5] * 6 + [7, 8, 9] * 4


def nodes(seq: Sequence) -> list[int]:
    return [step.nodes for step in seq.trace.decoding]


def _costs(random: np.random.Generator, flat: int = 0) -> Budget:
    """A made-up machine: passes get dearer with their rows, by steps of any size."""
    times = 1.0 + np.concatenate((np.zeros(flat), random.exponential(0.1, 400))).cumsum()
    return Budget(64, 64, pass_seconds=lambda context: times + 1e-4 * context * np.arange(len(times)))


def test_the_chosen_lengths_are_those_of_brute_force() -> None:
    random = np.random.default_rng(0)
    for _ in range(400):
        n, longest, rows = int(random.integers(1, 4)), int(random.integers(1, 4)), int(random.integers(0, 5))
        a, budget, draft = random.random(n), _costs(random, int(random.integers(0, 9))), random.exponential(0.05)
        # Every request's context costs its own rows, so that the order of gains decides where all are as long.
        contexts = [int(random.integers(0, 900))] * n

        def goodput(lengths: tuple[int, ...], a=a, budget=budget, draft=draft, rows=rows, contexts=contexts) -> float:
            gained = sum((1 - rate ** (k + 1)) / (1 - rate) for rate, k in zip(a, lengths, strict=True))
            fixed, near = np.array([rows + len(lengths) + sum(lengths)]), 200 * rows
            seconds = budget.seconds(fixed)[0] + 1e-4 * sum(
                context * (1 + k) for context, k in zip((*contexts, near), (*lengths, rows - 1), strict=True)
            )
            return gained / (seconds + draft * sum(lengths))

        every = itertools.product(range(longest + 1), repeat=n)
        settings = {"longest": longest, "draft_seconds": draft, "contexts": contexts, "others": [(rows, 200 * rows)]}
        own = best_lengths(a, budget, uniform=False, **settings)
        assert goodput(tuple(own)) == pytest.approx(max(map(goodput, every)))
        same = best_lengths(a, budget, uniform=True, **settings)
        assert len(set(same)) == 1
        assert goodput(tuple(same)) == pytest.approx(max(goodput((k,) * n) for k in range(longest + 1)))


def test_more_requests_never_draft_more_each() -> None:
    budget = Budget(64, 64, pass_seconds=lambda context: 1.0 + 0.02 * np.arange(1024))
    for rate in (0.3, 0.6, 0.9):
        lengths = [int(best_lengths(np.full(n, rate), budget, longest=8, uniform=True)[0]) for n in range(1, 65)]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_goodput_gives_up_where_nothing_is_accepted_and_comes_back() -> None:
    policy, drafted = Goodput(), []
    (seq,) = decode(TARGET, [PROMPT], max_new_tokens=1)
    seq.rebind(drafter=DraftModel(OTHER))
    seq.rebind(draft_length=policy)
    seq.states[policy] = policy.start(seq)
    limit = Budget(64, 64, pass_seconds=lambda context: 1.0 + 0.1 * np.arange(100))
    for step in range(300):
        length = policy.bound(seq, limit, [seq]).nodes
        drafted.append(length)
        accepted = 0 if step < 100 else min(length, 9 if step % 10 else 0)
        tree = DraftTree.chain(1, [2] * length)
        seen = VerificationFeedback(
            tree, torch.zeros(1), {}, list(range(1, accepted + 1)), [3] * (accepted + 1), start=0
        )
        policy.observe(seq, seen, seconds=0.0)
    assert np.mean(drafted[80:100]) < 0.2
    assert np.mean(drafted[-50:]) > 2


def test_every_texts_context_counts_not_the_planning_ones_alone() -> None:
    # Every token of a context costs every row that attends to it a thousandth of a bare pass.
    limit = Budget(64, 64, pass_seconds=lambda context: 1.0 + (0.01 + 1e-3 * context) * np.arange(200), context=3)
    acceptance, settings = np.array([0.7, 0.7]), {"longest": 8, "uniform": True}

    def length(*contexts: int) -> int:
        return int(best_lengths(acceptance, limit, contexts=contexts, **settings)[0])

    assert length(3, 3) > length(3, 400) > length(400, 400)
    limit = Budget(64, 64, pass_seconds=lambda context: 1.0 + (0.1 + 1e-3 * context) * np.arange(200), context=3)
    alone = best_lengths(acceptance[:1], limit, contexts=[3], longest=8, uniform=True)
    beside = best_lengths(acceptance[:1], limit, contexts=[3], others=[(1, 90)], longest=8, uniform=True)
    assert beside[0] > alone[0], "what the pass costs anyway is shared by more tokens"
    # The same through the policy, whoever plans first.
    texts = []
    for tokens in ([1] * 5, [1] * 400):
        (seq,) = decode(TARGET, [tokens], max_new_tokens=2)
        seq.rebind(drafter=DraftModel(OTHER), draft_length=Goodput(each="batch"))
        seq.states[seq.request.draft_length] = seq.request.draft_length.start(seq)
        texts.append(seq)
    planned = []
    for seq in texts:
        context = replace(limit, context=len(seq.tokens))
        for each in texts:
            each.states[each.request.draft_length].planned = None
        planned.append(seq.request.draft_length.bound(seq, context, texts).nodes)
    assert planned[0] == planned[1] < length(3, 3)


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_hardware_resumes_soon_after_drafts_have_become_good(rate: float) -> None:
    waits = []
    for seed in range(6):
        random, policy, drafted = np.random.default_rng(seed), Hardware(), []
        (seq,) = decode(TARGET, [PROMPT], max_new_tokens=1)
        seq.rebind(drafter=DraftModel(OTHER))
        seq.rebind(draft_length=policy)
        seq.states[policy] = policy.start(seq)
        limit = Budget(64, 64, pass_seconds=lambda context: 1.0 + 0.1 * np.arange(100))
        for step in range(800):
            bound = policy.bound(seq, limit, [seq])
            length = min(bound.nodes, bound.depth) if bound.nodes else 0
            drafted.append(bound.nodes)
            passed = int((random.random(length) < (rate if step >= 500 else 0.0)).cumprod().sum())
            seen = VerificationFeedback(
                DraftTree.chain(1, [2] * length), torch.zeros(1), {}, [*range(1, passed + 1)], [], 0
            )
            policy.observe(seq, seen, seconds=0.0)
        assert np.mean(drafted[300:500]) < 0.5
        steady, after = np.mean(drafted[-100:]), np.convolve(drafted[500:], np.ones(8) / 8, "valid")
        waits.append(int(np.flatnonzero(after >= steady / 2)[0]))
    assert np.median(waits) <= 60 and max(waits) <= 150


def test_goodput_shares_the_pass_with_what_else_is_in_it() -> None:
    budget = Budget(64, 64, pass_seconds=lambda context: np.maximum(1.0, np.arange(2000) / 16))
    assert best_lengths(np.array([0.05]), budget, longest=8, uniform=False)[0] > 0
    assert best_lengths(np.array([0.05]), budget, longest=8, others=[(15, 0)], uniform=False)[0] == 0
    few = best_lengths(np.array([0.9, 0.2]), budget, longest=8, others=[(8, 0)], uniform=False)
    assert few[0] > few[1]


def test_the_best_tree_is_the_best_of_all() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        rates = -np.sort(-random.dirichlet(np.ones(4), size=3)[:, :3], axis=1)
        chances, depths = best_tree(rates, 5)
        places = {(): 1.0}
        for depth in range(5):
            row = rates[min(depth, 2)]
            deeper = {
                (*path, rank): places[path] * row[rank] for path in places if len(path) == depth for rank in range(3)
            }
            places |= deeper
        del places[()]
        assert chances == pytest.approx(sorted(places.values(), reverse=True)[:5])
        assert all(depths[at] == 1 or depths[at] - 1 in depths[:at] for at in range(5))


def test_rates_of_ranks_and_depths_are_learned() -> None:
    random, rates = np.random.default_rng(2), ChildRates()
    tree = DraftTree(np.arange(7), np.array([-1, 0, 0, 1, 1, 2, 3]))
    for _ in range(4000):
        first = random.choice([1, 2, 0], p=[0.6, 0.3, 0.1])
        path = [first] if first else []
        if first == 1 and random.random() < 0.5:
            path.append(4)
        rates.learn(tree, path, full=True, depth=9, forget=1.0)
    found = rates.rates
    assert found[0, :2] == pytest.approx([0.6, 0.3], abs=0.03)
    # After node 1 the second child is the better one; a place counts as no better than the places before it.
    assert found[1, 0] == found[1, 1] and found[1, 0] < 0.2
    assert (found.sum(axis=1) < 1).all() and (np.diff(found, axis=1) <= 0).all()


def test_places_a_drafter_leaves_empty_are_worth_nothing() -> None:
    rates = ChildRates()
    for _ in range(400):
        rates.learn(DraftTree.chain(1, [2, 3]), [1, 2], full=False, depth=9, forget=1.0)
    assert rates.rates[0, 0] > 0.95 and rates.rates[0, 1] < 0.05 and rates.rates[2, 0] < 0.05
    chances, depths = best_tree(rates.rates, 64)
    cheap = Budget(64, 64, pass_seconds=lambda context: 1.0 + 1e-2 * np.arange(200))
    assert best_size(chances, depths, cheap, [0]) == 2


@pytest.mark.parametrize("sequences", [1, 4])
def test_the_best_size_is_that_of_brute_force(sequences: int) -> None:
    random = np.random.default_rng(3)
    for _ in range(100):
        chances, depths = best_tree(-np.sort(-random.dirichlet(np.ones(9), size=4), axis=1), 40)
        budget, level = _costs(random, 8), random.exponential(0.02)

        def rate(size: int, chances=chances, depths=depths, budget=budget, level=level) -> float:
            seconds = budget.seconds(np.array([sequences * (size + 1)]))[0]
            return (1 + chances[:size].sum()) / (seconds + sequences * level * depths[:size].max(initial=0))

        chosen = best_size(chances, depths, budget, [0] * sequences, level_seconds=level)
        assert rate(chosen) == pytest.approx(max(map(rate, range(41))))


@pytest.mark.parametrize(("slope", "least", "most"), [(0.0, 15, 20), (0.3, 0, 3)])
def test_hardware_drafts_what_the_machine_makes_pay(slope: float, least: float, most: float) -> None:
    engine = Engine(TARGET, pass_seconds=lambda length: 1.0 + slope * np.arange(200))
    request = Request(
        PROMPT, max_new_tokens=80, drafter=TokenRecycling(nodes=20, scope="request"), draft_length=Hardware()
    )
    engine.run([seq := engine.submit(request)])
    assert least <= np.mean(nodes(seq)[10:]) <= most


def test_policies_work_for_requests_that_come_and_go() -> None:
    engine = Engine(TARGET, pass_seconds=lambda length: 1.0 + 0.05 * np.arange(1024))
    for policy in (Goodput(each="batch"), Goodput(), Hardware()):
        make = [
            Request([3, n], max_new_tokens=5 + 4 * n, drafter=DraftModel(OTHER), draft_length=policy) for n in range(4)
        ]
        plain = Request(PROMPT, max_new_tokens=9, drafter=PromptLookup())
        engine.run([engine.submit(request) for request in [*make, plain]])


@pytest.mark.parametrize(
    "spec",
    [
        *("goodput:longest=0", "goodput:probe=0", "goodput:forget=1", "hardware:most=0", "hardware:forget=0"),
        *(
            "specdec++:head=x,threshold=1.5",
            "specdec++:head=x,shortest=9,longest=3",
            "specdec++",
            "memory",
            "memory:mib=0",
        ),
    ],
)
def test_bad_settings_of_adaptive_policies_are_refused(spec: str) -> None:
    with pytest.raises(SettingsError, match="needs"):
        dc.core.registry.resolve("draft-length", spec)

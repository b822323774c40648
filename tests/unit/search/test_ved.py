"""VED: values, gates and budgets are those of the formula; with exact values it finds the best id of a catalogue."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained, Constraint
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search.base import Branches
from decodery.search.beam import Beam
from decodery.search.ved import VED, ValueTree
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel, tiny_transformer, to_int8
from decodery.testing.models import Counted
from decodery.training.value import states_of

VOCAB, DEPTH = 5, 3
TOY = TableModel(VOCAB, seed=3)
_DRAWS = np.random.default_rng(4)
IDS = sorted({tuple(int(each) for each in _DRAWS.integers(VOCAB, size=DEPTH)) for _ in range(30)})


class Catalogue(Constraint):
    """Allows the ids above."""

    def init(self, prompt):
        return ()

    def allowed(self, state):
        mask = np.zeros(VOCAB, dtype=bool)
        mask[[each[len(state)] for each in IDS if len(state) < DEPTH and each[: len(state)] == state]] = True
        return mask

    def advance(self, state, token):
        return (*state, token)

    def is_complete(self, state):
        return len(state) == DEPTH


class Best(Scorer):
    """The best return of an id that begins so: where the model finds ids likely, they are worth little."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        found = [max(map(_worth, _after(output))) for output in candidates.outputs]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def _after(begun: Ordered[int]) -> list[tuple[int, ...]]:
    return [each for each in IDS if each[: len(begun)] == tuple(begun)]


def _worth(item: tuple[int, ...]) -> float:
    return 1.0 - LIKELY[item] / max(LIKELY.values())


def _request(**settings) -> Request:
    return Request(
        [1, 2], 3, sampler=Sampler((Constrained(Catalogue()), *Sampler.from_settings().processors)), **settings
    )


def _probabilities() -> dict[tuple[int, ...], float]:
    """Of the whole ids, by a beam search that is wide enough for all."""
    found = Beam(width=len(IDS), length_penalty=0).run(Engine(TOY), _request())
    assert sorted(tuple(seq.generated) for seq in found) == IDS
    return {tuple(seq.generated): math.exp(seq.score) for seq in found}


LIKELY = _probabilities()
BEST = max(IDS, key=_worth)


def _grown(settings: VED, **request) -> ValueTree:
    """A tree as it is searched."""
    tree = ValueTree(settings, Branches(Engine(TOY), _request(**request), settings))
    run_sync(tree.begin())
    while not tree.root.closed and tree.spent < settings.budget:
        node = tree.select()
        run_sync(tree.expand(node, tree.drawn(node)))
    return tree


def test_with_exact_values_and_a_budget_for_all_the_best_id_comes_first_and_all_are_found() -> None:
    for seed in range(2):
        found = VED(Best(), beta=0.0, budget=200, k=100).run(Engine(TOY), _request(seed=seed))
        assert sorted(tuple(seq.generated) for seq in found) == IDS
        assert tuple(found[0].generated) == BEST and found[0].score == _worth(BEST)


def test_values_find_what_a_beam_of_equal_work_does_not() -> None:
    # Worth runs against likelihood: two beams of 6 read no less than the budget.
    budget, wanted = 14, sorted(IDS, key=_worth)[-4:]
    beams = Beam(width=6).run(Engine(TOY), _request())
    recall = []
    for seed in range(6):
        found = VED(Best(), width=3, budget=budget, k=6).run(Engine(TOY), _request(seed=seed))
        assert all(tuple(seq.generated) in IDS for seq in found)
        recall.append(sum(tuple(seq.generated) in wanted for seq in found) / 4)
    of_beams = sum(tuple(seq.generated) in wanted for seq in beams) / 4
    assert np.mean(recall) > of_beams + 0.2


@pytest.mark.parametrize("head", [False, True])
def test_the_budget_is_what_the_model_reads_after_the_prompt(head: bool) -> None:
    model = Counted(to_int8(tiny_transformer(1)))
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(model.config.hidden_size, generator=draws, dtype=torch.float32, device="cpu")
    value = LinearValue(weight, torch.zeros((), dtype=torch.float32, device="cpu"), model.config.num_layers)
    scorer = ValueHead(value) if head else Even()
    for budget in (9, 10, 30):
        search = VED(scorer, width=3, budget=budget)
        model.rows.clear()
        (first, *_) = search.run(Engine(model), Request([5, 9, 2], 3, eos_ids=(0, 3)))
        assert budget >= sum(model.rows) - 3 >= budget - 1
        if head:
            states = states_of(model, [5, 9, 2], first.generated, value.tap)
            assert first.score == pytest.approx(float(states[-1] @ weight.double()), rel=1e-4)
    with pytest.raises(SettingsError, match="larger budget"):
        VED(scorer, budget=1).run(Engine(model), Request([5, 9, 2], 3))


def test_rounds_are_bounded_where_last_tokens_cost_nothing() -> None:
    """A request for one token has as many whole texts as there are tokens, and none of them is read."""
    request = Request([5, 9, 2], 1)
    found = VED(Even(), width=2, budget=2, k=100).run(Engine(to_int8(tiny_transformer(1))), request)
    assert len(found) == 2 + 8 * 2
    # A server counts all nodes that may be kept.
    assert VED(Even(), budget=200).texts_at_once == 200 and VED(Even(), k=90, budget=68).texts_at_once == 90


def test_whole_texts_of_the_beam_are_kept_when_the_budget_is_spent() -> None:
    settings = VED(Even(), width=5, budget=1)
    tree = ValueTree(settings, Branches(Engine(TOY), Request([1, 2], 3, eos_ids=(0, 1, 2)), settings))
    run_sync(tree.begin())
    assert tree.root.children.keys() > {0, 1, 2} and len(tree.root.children) == 4 and tree.spent == 1


class Even(Scorer):
    """The share of even tokens."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        found = [sum(token % 2 == 0 for token in output) / max(len(output), 1) for output in candidates.outputs]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def test_every_choice_is_the_one_of_the_formula() -> None:
    settings = VED(Even(), width=2, budget=24, entropy_weight=0.3, beta=0.7)
    tree = ValueTree(settings, Branches(Engine(TOY), _request(seed=3), settings))
    run_sync(tree.begin())
    known = {tuple(node.seq.generated): node for node in tree.nodes}
    for path, node in known.items():
        if path:
            assert node.value == sum(token % 2 == 0 for token in path) / len(path)
    # The beams of the first tree are those of beam search, and each node has its own value, not its parent's.
    beams = Beam(width=2).run(Engine(TOY), _request())
    assert {tuple(seq.generated) for seq in beams} <= known.keys()
    gated = 0
    while not tree.root.closed and tree.spent < settings.budget:
        visits = {path: 1 + _descendants(path, known) for path in known}
        for path, node in known.items():
            assert node.visits - visits[path] == -_first(path, known, tree)
        expected, stuck = _next(known, settings)
        gated += stuck
        node = tree.select()
        assert tuple(node.seq.generated) == expected
        run_sync(tree.expand(node, tree.drawn(node)))
        known = {tuple(each.seq.generated): each for each in tree.nodes}


def _descendants(path, known) -> int:
    return sum(1 for other in known if len(other) > len(path) and other[: len(path)] == path)


def _first(path, known, tree) -> int:
    """Descendants that the beam search made, which are no visits."""
    made = [tuple(node.seq.generated) for node in tree.nodes[:FIRST]]
    return sum(1 for other in made if len(other) > len(path) and other[: len(path)] == path)


FIRST = 1 + 2 * DEPTH
"""Nodes of the first tree with two beams: the root, and two of each depth."""


def _next(known, settings) -> tuple[tuple[int, ...], bool]:
    """The node to be expanded, from the paths that are known alone."""

    def valid(path):
        return {each[len(path)] for each in _after(path)} if len(path) < DEPTH else set()

    def tried(path):
        return {other[-1] for other in known if len(other) == len(path) + 1 and other[:-1] == path}

    def gain(path):
        node = known[path]
        entropy = -sum(share * math.log(share) for share in node.shares)
        return (node.value if path else 0.0) + settings.entropy_weight * (entropy if len(path) < DEPTH else 0.0)

    def bound(path):
        return gain(path) + settings.beta * math.sqrt(math.log(known[()].visits + 1) / (known[path].visits + 1))

    def is_open(path):
        if valid(path) - tried(path):
            return True
        return any(is_open((*path, token)) for token in tried(path))

    def passes(path):
        level = [gain(other) for other in known if len(other) == len(path) and valid(other) - tried(other)]
        return bool(valid(path) - tried(path)) and gain(path) >= sum(level) / len(level) - 1e-12

    path: tuple[int, ...] = ()
    while not passes(path):
        below = [(*path, token) for token in tried(path) if is_open((*path, token))]
        if not below:
            return max(filter(passes, known), key=bound), True
        path = max(below, key=bound)
    return path, False


def test_tokens_are_drawn_from_the_model_among_those_that_were_not_tried() -> None:
    counts: dict[int, int] = {}
    settings = VED(Even(), width=1, budget=9)
    tree = ValueTree(settings, Branches(Engine(TOY), _request(), settings))
    run_sync(tree.begin())
    for seed in range(400):
        tree.root.seq.request = replace(tree.root.seq.request, seed=seed)
        token = tree.drawn(tree.root)
        counts[token] = counts.get(token, 0) + 1
    left = zip(tree.root.ids.tolist(), tree.root.shares.tolist(), strict=True)
    shares = {each: share for each, share in left if each not in tree.root.children}
    assert counts.keys() <= shares.keys()
    total = sum(shares.values())
    expected = np.array([400 * shares[token] / total for token in sorted(shares)])
    observed = np.array([counts.get(token, 0) for token in sorted(shares)])
    # The draw of the most likely token, which is the wrong rule, is far beyond any bound.
    wrong = np.where(expected == expected.max(), 400, 0)
    assert ((observed - expected) ** 2 / expected).sum() < 20 < ((wrong - expected) ** 2 / expected).sum()


def test_all_ids_of_the_catalogue_are_distinct_beginnings() -> None:
    assert 10 < len(IDS) < len(list(product(range(VOCAB), repeat=DEPTH)))


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="k of at least 1"):
        VED(Even(), k=0)
    with pytest.raises(SettingsError, match="beta"):
        VED(Even(), beta=-1.0)

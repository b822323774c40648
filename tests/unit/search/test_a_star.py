"""A*-decoding against brute force over the tree that it wrote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import draw, mix
from decodery.core.trace import Grown
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search import a_star
from decodery.search.a_star import AStar, Frontier, Waiting, edge_cost
from decodery.search.step_nodes import Node
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel, decode

END, MODEL, PROMPT = 0, TableModel(4, order=3), [1]
DRAWN = Sampler.from_settings(temperature=1.0)
STEPS = {"delimiter": (3,), "step_tokens": 1, "rounds": 8}


class Table(Scorer):
    """A reward in (0, 1) for every text."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([draw(mix(5, *output), 0) for output in candidates.outputs], dtype=torch.float64)


class Path(Scorer):
    """1 for one text and its beginnings, a half for all others."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def score(self, candidates: Candidates) -> torch.Tensor:
        on = [self.text[: len(output)] == list(output) for output in candidates.outputs]
        return torch.tensor([1.0 if each else 0.5 for each in on], dtype=torch.float64)


def search(chosen: AStar, seed: int = 0, sampler: Sampler = DRAWN, length: int = 5, **settings: Any) -> list[Any]:
    request = Request(PROMPT, sampler=sampler, seed=seed, max_new_tokens=length, eos_ids=(END,), **settings)
    return chosen.run(Engine(MODEL), request)


def ended(grown: Sequence[Grown], cost: str) -> list[tuple[float, list[int]]]:
    """f and tokens of every text that has ended; of equal ones only the first was scored."""
    found = []
    for part in grown:
        if part.finish is None or part.score is None:
            continue
        line = [part]
        while line[0].parent >= 0:
            line.insert(0, grown[line[0].parent])
        h = [1.0, *(1 - each.score for each in line)]
        f = h[-1] + sum(edge_cost(before, after, cost) for before, after in itertools.pairwise(h))
        found.append((f, [token for each in line for token in each.tokens]))
    return found


class Watched(Frontier):
    """Notes what is taken. Wrong on purpose where `eager` is set: what has ended is taken before its turn."""

    seen: ClassVar[list[float]] = []
    eager = False

    def take(self, most: int) -> list[Waiting]:
        ended = [each for each in self.waiting if each.node.finished]
        taken = ended[-1:] if self.eager and ended else super().take(most)
        self.seen += [each.f for each in taken]
        return taken


def test_the_goal_is_the_best_of_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a_star, "Frontier", Watched)
    wrong = 0
    for seed in range(8):
        for eager in (False, True):
            Watched.seen, Watched.eager = [], eager
            chosen = AStar(Table(), k=3, cost="consistent", expansions=400, **STEPS)
            (found,) = search(chosen, seed)
            grown = found.trace.grown
            ends = ended(grown, "consistent")
            mine = min(f for f, text in ends if text == found.generated)
            best = math.isclose(mine, min(ends)[0])
            if eager:
                wrong += not best
            else:
                assert best and Watched.seen == sorted(Watched.seen)
                assert sum(len(part.tokens) for part in grown) == found.trace.ledger.tokens
                assert found.trace.ledger.counts["expansions"] == len(Watched.seen) - 1
    assert wrong


def test_a_certain_path_is_followed_straight() -> None:
    for seed in range(3):
        (plain,) = decode(MODEL, [PROMPT], seeds=(seed,), sampler=DRAWN, max_new_tokens=5, eos_ids=(END,))
        text = [token for token in plain.generated if token != END]
        for cost in ("drop", "consistent"):
            (found,) = search(AStar(Path(text), k=2, cost=cost, **STEPS), seed)
            assert found.generated == plain.generated
            assert found.trace.ledger.counts["expansions"] == len(plain.generated)


def test_narrow_and_cold_searches_are_plain_decoding() -> None:
    settings = {"max_new_tokens": 5, "eos_ids": (END,)}
    for sampler, k in ((DRAWN, 1), (Sampler.from_settings(), 4)):
        (plain,) = decode(MODEL, [PROMPT], seeds=(4,), sampler=sampler, **settings)
        (found,) = search(AStar(Table(), k=k, **STEPS), 4, sampler)
        ledger = found.trace.ledger
        assert found.generated == plain.generated
        assert ledger.tokens == ledger.scorer_calls == len(plain.generated)
    chosen = AStar(Table(), k=3, batch=2, goals=3, **STEPS)
    assert [seq.tokens for seq in search(chosen, 4, drafter=PromptLookup())] == [
        seq.tokens for seq in search(chosen, 4)
    ]


def test_budgets_end_the_search() -> None:
    # What has ended already is taken.
    (found,) = search(AStar(Table(), k=4, expansions=2, **STEPS), 1, length=2)
    assert found.trace.ledger.counts["expansions"] <= 2 and "completed" not in found.trace.ledger.counts
    (found,) = search(AStar(Path([1, 1, 1, 1, 1, 1]), k=4, tokens=5, **STEPS), 3, length=6)
    counts = found.trace.ledger.counts
    assert counts["expansions"] == 2 and (counts.get("completed", 0) == 1 or found.generated[-1] == END)
    assert found.finished and found.trace.ledger.tokens <= 8 + 6
    (found,) = search(AStar(Table(), k=4, frontier=2, **STEPS), 1)
    assert found.finished and found.trace.ledger.counts["dropped"] > 0
    goals = search(AStar(Table(), k=4, goals=3, **STEPS), 1)
    assert len(goals) == 3 and [seq.score for seq in goals] == sorted((seq.score for seq in goals), reverse=True)
    voted = search(AStar(Table(), k=4, goals=3, choose="vote", answer="whole", **STEPS), 1)
    assert sum(seq.score for seq in voted) == pytest.approx(1)


def test_the_frontier_orders_by_f_then_depth_then_age() -> None:
    def waiting(f: float, depth: int, finished: bool = False) -> Waiting:
        return Waiting(Node(type("Text", (), {"finished": finished}), 0, depth=depth), 0.0, f)

    first, deep, shallow, goal, last = (
        waiting(0.1, 1), waiting(0.2, 3), waiting(0.2, 2), waiting(0.3, 1, True), waiting(0.4, 1),
    )  # fmt: skip
    frontier = Frontier()
    frontier.push([last, goal, shallow, deep, first])
    assert frontier.take(0) == []
    assert frontier.take(2) == [first, deep] and frontier.take(5) == [shallow]
    assert frontier.take(0) == [goal] and frontier.take(5) == [last] and frontier.take(5) == []
    capped = Frontier(2)
    capped.push([last, goal, shallow, deep, first])
    assert capped.waiting == [first, deep] and capped.dropped == 3
    assert edge_cost(0.25, 0.75, "drop") == 0.5 == edge_cost(0.75, 0.25, "consistent")
    assert edge_cost(0.75, 0.25, "drop") == 0.0 == edge_cost(0.25, 0.75, "consistent")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k of at least 1"),
        ({"tokens": 0}, "tokens of at least 1"),
        ({"cost": "euclid"}, "drop or consistent"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        AStar(Table(), **settings)


class Second(Scorer):
    """All beginnings promise much, and of longer texts those alone that have a 1 in the second place."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        rewards = [0.9 if len(out) == 1 else float(list(out[1:2]) == [1]) * 0.95 + 0.04 for out in candidates.outputs]
        return torch.tensor(rewards, dtype=torch.float64)


def test_a_widening_search_finds_what_its_first_draws_missed() -> None:
    narrow, wide, first = (
        [search(AStar(Second(), k=1, widening=power, goals=goals, **STEPS), seed, length=8)[0] for seed in range(12)]
        for power, goals in ((None, 1), (0.5, 1), (0.5, 2))
    )
    right = [sum(seq.generated[1:2] == [1] for seq in found) for found in (narrow, wide)]
    assert right[0] + 2 <= right[1], right
    # Where nothing waits any more it goes on: one line has one end, and here a second one is found.
    assert all(seq.trace.ledger.counts["expansions"] > len(seq.generated) for seq in first)
    with pytest.raises(SettingsError, match="a power above 0"):
        AStar(Table(), widening=2.0)

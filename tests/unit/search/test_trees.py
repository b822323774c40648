"""Trees of steps: what is looked at, visited and valued, against definitions and by following the trace again."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import draw
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search import mcts
from decodery.search.dvts import DVTS
from decodery.search.lookahead import Lookahead
from decodery.search.mcts import MCTS
from decodery.search.step_beam import StepBeam
from decodery.search.steps import StepSearch
from decodery.search.tree_of_thoughts import TreeOfThoughts
from decodery.search.value_guided import ValueGuided
from decodery.search.weighted_vote import WeightedVote
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel, decode
from methods import DRAFTERS, SEARCHES, TREES, Even
from sampled import MODEL, OTHER, PLAIN, PROMPT, plain, run, told

LONG: dict[str, Any] = {"eos_ids": (9, 11)}
GREEDY: dict[str, Any] = LONG | {"sampler": Sampler.from_settings()}
NARROW: dict[str, Any] = {
    "lookahead": Lookahead(StepBeam(Even(), (7,), 3, n=1, m=1), k=2),
    "mcts": replace(SEARCHES["mcts"], n=1),  # type: ignore[arg-type]
    "tree-of-thoughts": replace(SEARCHES["tree-of-thoughts"], n=1, b=1),  # type: ignore[arg-type]
    "value-guided": replace(SEARCHES["value-guided"], n=1, width=1),  # type: ignore[arg-type]
}


def conserved(trace: Trace) -> bool:
    """Whether what stands on the tree's edges, and what was only looked at, is all that was written."""
    looked = trace.ledger.counts.get("rolled_out", 0)
    return sum(len(part.tokens) for part in trace.grown) + looked == trace.ledger.tokens


@pytest.mark.parametrize("name", sorted(TREES))
def test_a_tree_keeps_the_laws_of_searches_over_steps(name: str) -> None:
    """Width one is plain decoding, temperature 0 greedy and judged once; drafts change no text, nothing gets lost."""
    (seq,) = run(NARROW[name], seed=5, **LONG)
    assert seq.generated == plain(1, seed=5, **LONG)[0] and seq.request.seed == 5
    assert len(seq.trace.grown) > 1 and conserved(seq.trace)
    found = run(SEARCHES[name], **GREEDY)
    assert [seq.generated for seq in found] == plain(1, **GREEDY)
    texts = {tuple(followed(found[0].trace, number)) for number in range(len(found[0].trace.grown))}
    # What is looked at ends where other texts do.
    assert found[0].trace.ledger.scorer_calls <= len(texts)
    found = run(SEARCHES[name], **LONG)
    assert conserved(found[0].trace) and all(seq.trace is found[0].trace for seq in found)
    assert [seq.score for seq in found] == sorted((seq.score for seq in found), reverse=True)  # type: ignore[type-var]
    drafter = DRAFTERS["draft-model"](OTHER)
    assert told(run(SEARCHES[name], drafter=drafter, **LONG)) == told(found)


def followed(trace: Trace, number: int) -> list[int]:
    """The text that ends with this part."""
    part = trace.grown[number]
    return [*(followed(trace, part.parent) if part.parent >= 0 else []), *part.tokens]


class Heard(Even):
    """Remembers what it was asked about."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []

    def score(self, candidates: Candidates) -> torch.Tensor:
        self.texts += [tuple(output) for output in candidates.outputs]
        return super().score(candidates)


def test_what_is_judged_is_where_a_text_leads() -> None:
    for make, k in ((StepBeam, 1), (DVTS, 2)):
        heard = Heard()
        found = run(Lookahead(make(heard, None, 3, rounds=3, n=2, m=1), k=k), eos_ids=())
        trace = found[0].trace
        begun = [followed(trace, number) for number, part in enumerate(trace.grown)]
        ends = set()
        for text in begun:
            room = min(3 * k, 12 - len(text))
            more = decode(MODEL, [PROMPT + text], max_new_tokens=room)[0].generated if room else []
            ends.add((*text, *more))
        assert set(heard.texts) == ends
        # A scorer that were shown the texts themselves would have heard this.
        assert set(heard.texts) != set(map(tuple, begun))
        assert trace.ledger.counts["rolled_out"] > 0 and conserved(trace)
        assert all(part.score is not None for part in trace.grown)


TABLE = TableModel(3, spread=0.0)
TREE: dict[str, Any] = {"sampler": PLAIN, "max_new_tokens": 3}
LEAVES = list(itertools.product(range(3), repeat=3))


class Leaves(Scorer):
    """A reward for every text of three tokens; a beginning promises the best of those below it, or nothing at all."""

    def __init__(self, seed: int, hints: bool) -> None:
        self.reward = {leaf: draw(seed, 0, number) for number, leaf in enumerate(LEAVES)}
        self.best = max(LEAVES, key=self.reward.__getitem__)
        self.hints = hints

    def promise(self, begun: tuple[int, ...]) -> float:
        if len(begun) < 3 and not self.hints:
            return 0.5
        return max(reward for leaf, reward in self.reward.items() if leaf[: len(begun)] == begun)

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([self.promise(tuple(output)) for output in candidates.outputs], dtype=torch.float64)


def searched(search: StepSearch, seed: int) -> Any:
    return search.run(Engine(TABLE), Request([1], seed=seed, **TREE))[0]


def test_the_right_values_lead_to_the_best_leaf() -> None:
    astray = 0
    for seed in range(2):
        known, hidden = Leaves(seed, hints=True), Leaves(seed, hints=False)
        steps: dict[str, Any] = {"delimiter": None, "step_tokens": 1, "n": 12}
        for search in (
            TreeOfThoughts(known, b=1, **steps),
            TreeOfThoughts(known, order="dfs", **steps),
            TreeOfThoughts(hidden, order="dfs", answers=27, **steps),
            MCTS(known, simulations=2, **steps),
            MCTS(hidden, simulations=50, moves="never", **steps),
            ValueGuided(known, None, 1, n=12, width=12),
        ):
            assert tuple(searched(search, 100 + seed).generated) == known.best
        astray += tuple(searched(TreeOfThoughts(hidden, b=1, **steps), 100 + seed).generated) != known.best
    # Without hints a breadth of one finds it by luck alone.
    assert astray


def walked(trace: Trace, search: MCTS, per_move: int) -> bool:
    """Whether every walk came to where the counts and means of those before it lead, by the definition."""
    visits, totals = dict[int, int](), dict[int, float]()
    first: dict[tuple[int, ...], int] = {}
    kept = [n for n in range(len(trace.grown)) if first.setdefault(tuple(followed(trace, n)), n) == n]
    known, here = {-1}, -1

    def mean(number: int) -> float:
        return totals[number] / visits[number] if number in visits else float(trace.grown[number].score or 0.0)

    def below(number: int) -> list[int]:
        return [n for n in kept if trace.grown[n].parent == number] if number in known else []

    for walk, leaf in enumerate(trace.visits):
        if walk and walk % per_move == 0:
            here = max(below(here), key=lambda n: (visits.get(n, 0), mean(n)))
        at = here
        while children := below(at):
            n_parent = visits.get(at, 0)
            rate = search.c + math.log((n_parent + search.base + 1) / search.base)
            bonus = {n: rate * math.sqrt(n_parent) / (1 + visits.get(n, 0)) for n in children}
            at = max(children, key=lambda n: mean(n) + bonus[n])
        if at != leaf:
            return False
        known.add(at)
        value = float(trace.grown[leaf].score or 0.0)
        while True:
            visits[at] = visits.get(at, 0) + 1
            totals[at] = totals.get(at, 0.0) + value
            if at < 0:
                break
            at = trace.grown[at].parent
    for number in known:
        # Each walk through a text but the one that came to it first went on to one of its children.
        if number in visits and (children := below(number)):
            assert sum(visits.get(n, 0) for n in children) == visits[number] - (number >= 0)
    return True


def test_walks_follow_the_bounds_and_values_are_backed_up_to_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_only(path: Any, value: float) -> None:
        """Wrong on purpose: what was found is told to the leaf and its parent alone."""
        for each in path[-2:]:
            each.visits += 1
            each.total += value

    def summed(path: Any, value: float) -> None:
        """Wrong on purpose: totals that are no means."""
        for each in path:
            each.visits += 1
            each.total += value * each.visits

    steps: dict[str, Any] = {"delimiter": None, "step_tokens": 1, "n": 8}
    for seed in range(2):
        hidden = Leaves(seed, hints=False)
        far = MCTS(hidden, simulations=60, moves="never", **steps)
        near = MCTS(hidden, simulations=9, **steps)
        traces = [searched(search, seed).trace for search in (far, near)]
        assert walked(traces[0], far, 60) and walked(traces[1], near, 9)
        assert not walked(traces[0], replace(far, c=0.2), 60)
        for wrong in (last_only, summed):
            with monkeypatch.context() as patched:
                patched.setattr(mcts, "back_up", wrong)
                assert not walked(searched(far, seed).trace, far, 60)


def test_walks_that_widen_find_what_the_first_draws_missed() -> None:
    steps: dict[str, Any] = {"delimiter": None, "step_tokens": 1, "n": 2, "simulations": 150, "moves": "never"}
    found = {None: 0, 0.5: 0}
    for seed in range(4):
        hidden = Leaves(seed, hints=False)
        for power in found:
            best = searched(MCTS(hidden, widening=power, **steps), seed)
            found[power] += tuple(best.generated) == hidden.best
            draws = [part.parent for part in best.trace.grown]
            assert max(map(draws.count, draws)) == 2 if power is None else draws.count(-1) > 2
    assert found[None] + 2 <= found[0.5] >= 3, found


def test_most_walks_go_through_the_step_that_the_best_text_begins_with() -> None:
    def most_visited(hidden: Leaves, search: MCTS, tell: Any) -> int:
        def tree(begun: tuple[int, ...]) -> mcts.Visited:
            node: Any = None
            children = [tree((*begun, token)) for token in range(3)] if len(begun) < 3 else []
            return mcts.Visited(node, hidden.promise(begun), children=children)

        root = tree(())
        for _ in range(800):
            path = [root]
            while path[-1].children:
                path.append(search.picked(path[-1]))
            tell(path, path[-1].value)
        return max(range(3), key=lambda token: root.children[token].visits)

    def upside_down(path: Any, value: float) -> None:
        """Wrong on purpose: what is good for one step is bad for the one before."""
        for depth, each in enumerate(reversed(path)):
            mcts.back_up([each], value if depth % 2 == 0 else 1 - value)

    trees = [Leaves(seed, hints=False) for seed in range(20)]
    for search in (MCTS(Even(), bound="uct", c=0.3), MCTS(Even(), c=0.1)):
        right, wrong = (
            sum(most_visited(hidden, search, tell) == hidden.best[0] for hidden in trees)
            for tell in (mcts.back_up, upside_down)
        )
        assert right >= 18 > 12 > wrong, (right, wrong)


def test_texts_are_drawn_by_their_values_and_without_replacement() -> None:
    """The first two of three that select=sampled follows, against the law of draws without replacement."""
    worth, counts = (0.6, 0.3, 0.1), dict.fromkeys(itertools.permutations(range(3), 2), 0)
    search = TreeOfThoughts(Even(), select="sampled", b=2)
    nodes: list[Any] = [_Valued(number, (value,)) for number, value in enumerate(worth)]
    for seed in range(1000):
        first, second = search._chosen(nodes, seed)
        counts[first.number, second.number] += 1
    from decodery.testing.statistics import chi_square

    law = torch.tensor([worth[a] * worth[b] / (1 - worth[a]) for a, b in counts], dtype=torch.float64).numpy()
    with_replacement = torch.tensor([worth[a] * worth[b] for a, b in counts], dtype=torch.float64).numpy()
    found = torch.tensor(list(counts.values())).double().numpy()
    assert chi_square(found, law) > 1e-3 > 1e-6 > chi_square(found, with_replacement / with_replacement.sum())


class _Valued:
    def __init__(self, number: int, scores: tuple[float, ...]) -> None:
        self.number, self.scores = number, scores


def test_depth_first_turns_back_below_the_threshold() -> None:
    known = Leaves(1, hints=True)
    steps: dict[str, Any] = {"delimiter": None, "step_tokens": 1, "n": 12, "order": "dfs"}
    above = sorted(known.reward.values())[-3]
    search = TreeOfThoughts(known, threshold=above, answers=3, **steps)
    found = search.run(Engine(TABLE), Request([1], seed=100, **TREE))
    assert [seq.score for seq in found] == sorted(known.reward.values())[:-4:-1]
    # Where nothing reaches the threshold the best of what was left is followed to an end.
    assert tuple(searched(replace(search, threshold=2.0, answers=1), 100).generated) == known.best


def test_value_guided_is_a_beam_or_lines_in_blocks_and_votes() -> None:
    parted = 0
    for seed in (0, 2):
        blocks: dict[str, Any] = {"delimiter": None, "step_tokens": 4, "n": 4}
        one = told(run(ValueGuided(Even(), width=2, lines=1, choose="best", **blocks), seed=seed, eos_ids=()))
        assert one == told(run(StepBeam(Even(), m=2, **blocks), seed=seed, eos_ids=()))
        apart = told(run(ValueGuided(Even(), width=2, choose="best", **blocks), seed=seed, eos_ids=()))
        assert apart == told(run(DVTS(Even(), m=2, **blocks), seed=seed, eos_ids=()))
        parted += one != apart
        voted = run(ValueGuided(Even(), rounds=1, width=1, answer="number", **blocks), seed=seed)
        assert told(voted) == told(run(WeightedVote(Even(), n=4, answer="number"), seed=seed))
    assert parted


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Lookahead("beam"), "over steps, such as step-beam"),
        (lambda: Lookahead(StepBeam(Even()), k=0), "k of at least 1"),
        (lambda: MCTS(Even(), simulations=0), "simulations of at least 1"),
        (lambda: MCTS(Even(), bound="ucb"), "puct or uct"),  # type: ignore[arg-type]
        (lambda: TreeOfThoughts(Even(), threshold=1.0), "order=dfs"),
        (lambda: ValueGuided(Even(), n=6, width=4), "n that width times lines divides"),
        (lambda: ValueGuided(Even(), delimiter=""), "delimiter that ends a step"),
        (lambda: run(TreeOfThoughts()), "token ids, or search through `LLM`"),
    ],
)
def test_bad_settings_are_named(make: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make()

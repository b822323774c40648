"""Top tokens and the trees made of what drafters remember, against slow and obvious counterparts."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import log, sqrt
from random import Random

import numpy as np
import pytest
import torch

from decodery.core.errors import NumericalError, SettingsError
from decodery.core.registry import resolve
from decodery.core.topk import logsumexp, topk
from decodery.speculative.tree_building.frequency import count_prefixes, frequency_tree
from decodery.speculative.tree_building.monte_carlo import enumerate_all, search
from decodery.speculative.tree_building.template import STAND, TOKEN_RECYCLING, RankRates, Template, unbalanced
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree


def random_text(random: np.random.Generator, n: int, size: int) -> list[int]:
    return random.integers(0, size, n).tolist()


def runs_of(text: list[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(text[start : start + length]) for start in range(len(text) - length + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 4, 64, 257, 5000])
def test_the_top_tokens_are_those_of_a_full_sort(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    for n, k in ((1, 1), (3, 8), (70, 10)):
        logits = (3 * torch.randn(n, vocab, dtype=dtype)).round(decimals=1)  # with ties
        logits[0, 2:] = -torch.inf
        ids, values = topk(logits, k)
        rows = logits.numpy()
        expected = np.lexsort((np.broadcast_to(np.arange(vocab), rows.shape), -rows), axis=1)[:, :k]
        assert (ids == expected).all()
        assert (values == np.take_along_axis(rows, expected, 1)).all()
        assert np.allclose(logsumexp(logits, values[:, 0]), logits.logsumexp(-1), atol=1e-5)


def test_the_top_tokens_of_no_distribution_are_refused() -> None:
    with pytest.raises(NumericalError, match="NaN"):
        topk(torch.full((2, 100), torch.nan), 5)


def test_the_published_template() -> None:
    template = TOKEN_RECYCLING
    assert len(template) == 80
    assert np.bincount(template.depths).tolist() == [1, 8, 21, 25, 15, 8, 3]
    assert (template.parents[1:] < np.arange(1, 81)).all()
    siblings = Counter(template.parents.tolist())
    assert all(sorted(template.ranks[template.parents == node]) == list(range(siblings[node])) for node in range(81))


def test_the_calibrated_template() -> None:
    assert len(STAND) == 80 and np.bincount(STAND.depths)[:4].tolist() == [1, 9, 19, 20]
    # Given by its numbers of children, level by level.
    counts = np.bincount(TOKEN_RECYCLING.parents[1:])
    again = Template.of(counts.tolist())
    for name in ("parents", "ranks", "depths"):
        assert getattr(again, name).tolist() == getattr(TOKEN_RECYCLING, name).tolist()


@pytest.mark.parametrize("nodes", [1, 2, 5, 20, 36, 52, 60])
def test_an_unbalanced_template_shrinks_with_depth_and_reaches_it(nodes: int) -> None:
    template = unbalanced(nodes, 6, 8)
    sizes = np.bincount(template.depths)[1:]
    assert len(template) == nodes
    assert len(sizes) == min(6, nodes)
    assert sizes[0] <= 8  # as many successors as there are
    assert (sizes[1:-1] >= sizes[2:]).all()


def filled(matrix: np.ndarray, budget: Budget, eos_ids: tuple[int, ...] = ()) -> DraftTree:
    rates = RankRates(matrix.shape[1]).rates
    tree, places = TOKEN_RECYCLING.fill(3, lambda nodes, tokens: matrix[tokens[nodes]], rates, budget, eos_ids=eos_ids)
    tree.validate()
    assert len(places) == len(tree) <= budget.nodes + 1
    assert tree.depths.max() <= budget.depth
    return tree


def test_a_template_is_filled_by_rank_and_cut_to_its_best_places() -> None:
    matrix = np.array([np.random.default_rng(row).permutation(50)[:8] for row in range(50)])
    whole = filled(matrix, Budget(80, 99))
    assert len(whole) == 81
    for node in range(1, 81):
        above = int(whole.tokens[whole.parents[node]])
        assert whole.tokens[node] == matrix[above, TOKEN_RECYCLING.ranks[node]]
    paths = {tuple(whole.tokens[whole.path(node)]) for node in range(81)}
    for nodes in (0, 1, 7, 30, 64):
        for depth in (1, 3, 9):
            part = filled(matrix, Budget(nodes, depth))
            assert {tuple(part.tokens[part.path(node)]) for node in range(len(part))} <= paths
    assert len(filled(matrix, Budget(30, 9))) == 31
    # Unknown rows and ends of the text have nothing below them.
    matrix[matrix[3, 0]] = -1
    stop = int(matrix[3, 1])
    cut = filled(matrix, Budget(80, 9), (stop,))
    inner = set(cut.tokens[cut.parents[1:]].tolist())
    assert inner and not inner & {stop, int(matrix[3, 0])}


def test_rank_rates_follow_what_is_seen() -> None:
    rates = RankRates(3)
    assert np.allclose(rates.rates, [1 / 2, 1 / 6, 1 / 12])
    rates.learn(np.array([2] * 60 + [3] * 40))
    assert rates.rates.argmax() == 2 and rates.rates.sum() < 1


TABLE = {
    (a, b): [(c, 0.1 + 0.3 * ((a + 2 * b + 5 * c) % 7)) for c in range(3) if (a, b, c) != (1, 2, 0)]
    for a in range(3)
    for b in range(3)
}


def successors(first: int, second: int) -> list[tuple[int, float]]:
    return TABLE[first, second]


def test_the_search_visits_what_a_slow_one_visits() -> None:
    tree = search((0, 1), successors, simulations=500, depth=4, c1=32.0, c2=8.0, random=Random(7))
    random = Random(7)
    visits: Counter[tuple[int, ...]] = Counter()
    scores: Counter[tuple[int, ...]] = Counter()
    expanded: set[tuple[int, ...]] = set()

    def below(path: tuple[int, ...]) -> list[tuple[int, float]]:
        return TABLE[(0, 1, *path)[-2], (0, 1, *path)[-1]]

    for _ in range(500):
        path: tuple[int, ...] = ()
        total = 1.0
        while path in expanded and len(path) < 3:

            def puct(step: tuple[int, float], path: tuple[int, ...] = path) -> float:
                child, n = (*path, step[0]), visits[(*path, step[0])]
                if n == 0:
                    return float("inf")
                c = 32.0 + log((visits[path] + 8.0 + 1.0) / 8.0)
                return scores[child] / n + step[1] * sqrt(visits[path]) * c / (1 + n)

            token, weight = max(below(path), key=puct)
            path, total = (*path, token), total + weight
        if len(path) < 3:
            expanded.add(path)
            token, weight = below(path)[int(random.random() * len(below(path)))]
            path, total = (*path, token), total + weight
        drawn = path
        while len(drawn) < 3:
            reached = random.random() * sum(weight for _, weight in below(drawn))
            for step in below(drawn):
                reached -= step[1]
                if reached < 0:
                    break
            drawn, total = (*drawn, step[0]), total + step[1]
        for end in range(len(path) + 1):
            visits[path[:end]] += 1
            scores[path[:end]] += total
    counted = {tree.path(node): tree.visits[node] for node in range(len(tree.tokens))}
    assert {path: count for path, count in counted.items() if count} == dict(visits)
    assert tree.visits[0] == 500


def test_a_small_search_space_is_taken_whole() -> None:
    whole = enumerate_all((0, 1), successors, depth=4, most=40)
    assert whole is not None
    possible = [path for length in (1, 2, 3) for path in product(range(3), repeat=length)]
    expected = {path for path in possible if (1, 2, 0) not in runs_of([0, 1, *path], 3)}
    assert {whole.path(node) for node in range(1, len(whole.tokens))} == expected
    assert len(whole.tokens) == len(expected) + 1
    assert enumerate_all((0, 1), successors, depth=4, most=20) is None


def test_the_commonest_continuations_are_those_of_a_count() -> None:
    random = np.random.default_rng(8)
    for _ in range(50):
        windows = random.integers(0, 3, (int(random.integers(1, 60)), 4))
        windows[np.logical_or.accumulate(random.random(windows.shape) < 0.1, axis=1)] = -1
        windows = windows[np.lexsort(windows.T[::-1])]
        expected: Counter[tuple[int, ...]] = Counter()
        for window in windows.tolist():
            text = window[: window.index(-1)] if -1 in window else window
            expected.update(tuple(text[:end]) for end in range(1, len(text) + 1))
        counted = count_prefixes(windows, 3)
        assert sorted(counted.counts.tolist()) == sorted(expected.values())
        tree = frequency_tree(5, windows, 10, 3)
        tree.validate()
        paths = [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(1, len(tree))]
        best = sorted(expected.values(), reverse=True)[:10]
        assert sorted((expected[path] for path in paths), reverse=True) == best
        narrow = count_prefixes(windows, 3, per_depth=2)
        assert not len(narrow.depths) or np.bincount(narrow.depths).max() <= 2
    assert len(frequency_tree(5, windows, 10, vocab_size=1).tokens) <= 5, "ids that are no tokens are left out"


def test_trees_fuse_by_longest_prefix() -> None:
    random = np.random.default_rng(10)

    def paths(tree: DraftTree) -> set[tuple[int, ...]]:
        return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}

    for _ in range(50):
        a, b = (
            DraftTree.from_paths(0, [random_text(random, 4, 3) for _ in range(int(random.integers(0, 8)))])
            for _ in range(2)
        )
        fused = a.merge(b)
        fused.validate()
        assert paths(fused) == paths(a) | paths(b) == paths(b.merge(a)) == paths(fused.merge(b))
        assert len(fused) == len(paths(fused))


def test_nodes_that_a_tree_lacks_are_refused() -> None:
    for name in ("token-recycling", "stand"):
        assert resolve("drafter", f"{name}:nodes=80").largest() == 80
        for nodes in (81, 128, 0):
            with pytest.raises(SettingsError, match=f"{name} drafts on a tree of 80 nodes: give nodes .* not {nodes}"):
                resolve("drafter", f"{name}:nodes={nodes}")

"""EAGLE-2, fixed trees, RSD, SpecInfer, SpecTr and the n-gram drafter against slow and obvious counterparts."""

from __future__ import annotations

import re
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.ngram import NGram
from decodery.speculative.trees.clover import Selection
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.speculative.trees.fixed_tree import EAGLE, FixedTree
from decodery.speculative.trees.k_chains import KChains
from decodery.speculative.trees.rsd_s import RSDS
from decodery.speculative.trees.specinfer import SpecInfer
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import run_sync
from decodery.step.level_choice import perturbed
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.testing import tiny_transformer
from grown_trees import GREEDY, WARM, Drawing, begun, law_after, noise_after, path_tokens, paths


def expanded_and_reranked(drafter: TreeDrafter, seq: Sequence, growth: EAGLE2) -> list[tuple[int, ...]]:
    """EAGLE-2 without thrift: every layer's best are expanded, all candidates are ranked at the end."""
    values: dict[tuple[int, ...], float] = {}
    layer: list[tuple[int, ...]] = [()]
    for _ in range(growth.depth):
        found = {}
        for path in layer:
            law = law_after(drafter, seq, path, shaped=False)
            for token in np.argsort(-law, kind="stable")[: growth.width].tolist():
                found[(*path, token)] = values.get(path, 0.0) + law[token]
        values |= found
        layer = sorted(found, key=lambda path: -found[path])[: growth.width]
    return sorted(sorted(values, key=lambda path: -values[path])[: growth.nodes])


def test_eagle_2_keeps_the_most_likely_of_all_candidates() -> None:
    for seed in range(60):
        growth = EAGLE2(nodes=1 + seed % 17, width=1 + seed % 4, depth=1 + seed % 5)
        drafter, seq = begun(growth, (GREEDY, WARM)[seed % 2], seed=seed)
        tree = run_sync(drafter.propose(seq, Budget(64, 9)))
        expected = expanded_and_reranked(drafter, seq, growth)
        assert sorted(paths(tree)) == expected
        for node in range(len(tree)):  # siblings are verified from the most likely on
            tokens = tree.tokens[tree.children(node)]
            law = law_after(drafter, seq, path_tokens(tree)[node], shaped=False)
            assert (np.diff(law[tokens]) <= 0).all()


def test_a_fixed_tree_holds_the_most_likely_tokens_at_its_places() -> None:
    drafter, seq = begun(FixedTree(paths=((0,), (1,), (0, 0), (1, 0), (1, 1))))
    ranked = {path: np.argsort(-law_after(drafter, seq, path), kind="stable") for path in [()]}
    first, second = ranked[()][:2].tolist()
    below = [np.argsort(-law_after(drafter, seq, (token,)), kind="stable").tolist() for token in (first, second)]
    expected = {(first,), (second,), (first, below[0][0]), (second, below[1][0]), (second, below[1][1])}
    assert set(paths(run_sync(drafter.propose(seq, Budget(64, 9))))) == expected


def test_the_published_shape_and_what_a_budget_leaves_of_it() -> None:
    assert np.bincount(EAGLE.depths).tolist() == [1, 4, 8, 8, 3, 2]
    for nodes in (1, 3, 9, 24):
        cut = EAGLE.within(nodes, 3)
        assert len(cut) == min(nodes, 20) and cut.depths.max() <= 3
    assert EAGLE.within(25, 5) is EAGLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fixed-tree(branching=2,paths=0)", "one of branching, paths and rates"),
        ("fixed-tree:paths=0:0/0:1", "needs its parent and the ranks before it"),
        ("fixed-tree:paths=1", "the path 1 needs its parent and the ranks before it"),
        ("fixed-tree:paths=0/-1", "ranks from 0 on"),
        ("fixed-tree:branching=40/40", "at most 1024 nodes"),
        ("rsd-c:branching=0", "at least one child"),
        ("rsd-s:width=0", "width and depth >= 1"),
        ("eagle-2:depth=0", "nodes, width and depth >= 1"),
        ("specinfer:expansion=", "at least one draw"),
        ("k-chains:length=0", "k >= 1 and length >= 1"),
        ("sequoia:acceptance=0.5/1.5", "each above 0 and at most 1"),
        ("sequoia:draft_cost=-1", "draft_cost, 0 or more"),
        ("dyspec:threshold=0", "threshold above 0"),
        ("clover:ratio=2", "ratio from 0 to 1"),
        ("fixed-tree:rates=0.5:2", "rates from 0 to 1"),
    ],
)
def test_a_bad_setting_is_named(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve("tree-policy", text)
    with pytest.raises(SettingsError, match=said):
        resolve("drafter", f"ngram:length=2,tree_policy={text if '(' in text else text.replace(':', '(', 1) + ')'}")


def test_a_length_of_chains_is_refused_where_trees_are_grown() -> None:
    for spec in ("ngram:length=6,tree_policy=eagle-2", "draft-model:length=9,tree_policy=sequoia", "eagle-3:length=8"):
        name, length = spec.partition(":")[0], re.search(r"length=\d+", spec)
        assert length is not None
        with pytest.raises(
            SettingsError, match=f"{name} grows trees here, and {length[0]} is of chains: .*tree_policy=none"
        ):
            resolve("drafter", spec)
    assert resolve("drafter", "eagle-3:length=8,tree_policy=none").length == 8
    # Here it bounds the depth of trees.
    assert resolve("drafter", "del:length=6,tree_policy=eagle-2").length == 6


def test_rsd_s_is_stochastic_beam_search() -> None:
    for seed in range(30):
        rule = (Coupled(), Drawing())[seed % 2]
        drafter, seq = begun(RSDS(width=3, depth=3), rule=rule, seed=seed)
        beam, expected = [((), 0.0, 0.0)], []
        for _ in range(3):
            found = []
            for path, logq, above in beam:
                below = logq + law_after(drafter, seq, path)
                values = below + noise_after(seq, path)
                with np.errstate(divide="ignore"):
                    conditioned = -np.log(np.exp(-above) - np.exp(-values.max()) + np.exp(-values))
                found += [((*path, token), below[token], conditioned[token]) for token in range(6)]
            beam = sorted(found, key=lambda each: -each[2])[:3]
            expected += sorted(path for path, _, _ in beam)
        tree = run_sync(drafter.propose(seq, Budget(64, 9)))
        assert [p for depth in (1, 2, 3) for p in sorted(p for p in paths(tree) if len(p) == depth)] == expected


def test_perturbed_children_never_exceed_their_parent() -> None:
    random = np.random.default_rng(0)
    above = random.gumbel(size=200) * 5
    values = -np.sort(-random.gumbel(size=(200, 7)) * 5, axis=1)
    values[::9, 5:] = -np.inf
    found = perturbed(*map(torch.from_numpy, (above, values))).numpy()
    assert np.abs(found[:, 0] - above).max() < 1e-9
    assert (np.diff(found[:, :5], axis=1) <= 0).all() and (found[::9, 5:] == -np.inf).all()


def test_a_greedy_request_searches_with_a_plain_beam() -> None:
    drafter, seq = begun(RSDS(width=2, depth=2), GREEDY)
    laws = {(): law_after(drafter, seq, ())}
    first = np.argsort(-laws[()])[:2].tolist()
    pairs = {(a, b): laws[()][a] + law_after(drafter, seq, (a,))[b] for a in first for b in range(6)}
    expected = {(a,) for a in first} | set(sorted(pairs, key=lambda pair: -pairs[pair])[:2])
    assert set(paths(run_sync(drafter.propose(seq, Budget(64, 9))))) == expected


def test_specinfer_draws_independently_and_merges_what_is_equal() -> None:
    counts = np.zeros((3, 3))
    drafter, seq = begun(SpecInfer((2,)), rule=Drawing(), vocab=3)
    merged = 0
    for seed in range(1000):
        seq.rebind(seed=seed)
        tree = run_sync(drafter.propose(seq, Budget(64, 9)))
        drawn = tree.tokens[tree.drawn(0)]
        assert len(drawn) == 2
        merged += len(tree) == 2
        counts[drawn[0], drawn[1]] += 1
    law = np.exp(law_after(drafter, seq, ()))
    expected = np.outer(law, law) * 1000
    assert merged == counts.trace() > 0
    assert ((counts - expected) ** 2 / expected).sum() < 26  # chi-square, 8 degrees: p = 0.001
    # Draws that shared their noise would all be pairs of equals, and draws without replacement none.
    for wrong in (np.diag(law), np.outer(law, law) * (1 - np.eye(3))):
        other = wrong / wrong.sum() * 1000 + 1e-9
        assert ((counts - other) ** 2 / other).sum() > 100


def test_every_chain_is_drawn_to_its_end() -> None:
    for seed in range(40):
        drafter, seq = begun(KChains(5, 4), rule=Drawing(), seed=seed, vocab=3)
        tree = run_sync(drafter.propose(seq, Budget(64, 9)))
        through = {0: 5}
        for node in range(len(tree)):
            draws = tree.drawn(node)
            assert len(draws) == (through[node] if tree.depths[node] < 4 else 0)
            through |= {child: draws.count(child) for child in draws}
        assert sum(through[node] for node in np.flatnonzero(tree.depths == 4).tolist()) == 5


def test_small_budgets_cut_chains_then_tokens() -> None:
    for nodes, (k, length) in {64: (5, 4), 19: (4, 4), 7: (1, 4), 3: (1, 3)}.items():
        drafter, seq = begun(KChains(5, 4), rule=Drawing())
        tree = run_sync(drafter.propose(seq, Budget(nodes, 9)))
        assert (len(tree.drawn(0)), tree.depths.max()) == (k, length) and len(tree) <= nodes + 1
    drafter, seq = begun(KChains(5, 4), GREEDY)
    assert run_sync(drafter.propose(seq, Budget(64, 9))).parents.tolist() == [-1, 0, 1, 2, 3]


def test_ngram_rows_are_distributions_of_what_was_expected() -> None:
    model = tiny_transformer()
    drafter = NGram(scope="request", smoothing=0.2, width=8)
    engine = Engine(model)
    seq = engine.submit(Request([5] * 6 + [7, 8, 9] * 4, drafter=drafter, max_new_tokens=30))
    for _ in range(6):
        engine.step()
    store = seq.states[seq.request.drafter]
    tree = DraftTree.from_paths(seq.last_token, [(7, 8, 9), (60, 61), (7, 9)])
    rows = run_sync(drafter.logits(seq, tree, [3, 0, 4, 2])).double().exp()
    assert torch.allclose(rows.sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-5) and (rows > 0).all()
    for row, path in zip(rows.numpy(), [(7, 8, 9), (), (60,), (7, 8)], strict=True):
        text = (*seq.tokens, *path)
        law = (store.counts + 100 / 64) / (store.counts + 100 / 64).sum()
        for order in (1, 2, 3, 4):
            (ids,), (weights,) = store.means.longest([text[-order:]], (order,))
            law = law * (1 - 0.8 * weights.sum())
            law[ids[ids >= 0]] += 0.8 * weights[ids >= 0]
        assert np.allclose(row, law, atol=1e-6)
    assert store.counts.sum() == len(seq.tokens) - 1


def selected(drafter: TreeDrafter, seq: Sequence, growth: Selection) -> set[tuple[int, ...]]:
    """Clover's selection, told by plain loops."""
    chosen: set[tuple[int, ...]] = set()
    level = {(): 0.0}
    while level and len(chosen) < growth.nodes:
        likely = {}
        for path, score in level.items():
            law, mass = np.exp(law_after(drafter, seq, path)), 0.0
            for token in np.argsort(-law, kind="stable").tolist():
                if mass >= growth.top_p or law[token] < growth.ratio * law.max():
                    break
                likely[(*path, token)] = score + np.log(law[token])
                mass += law[token]
        best = sorted(likely, key=lambda path: -likely[path])[: growth.nodes - len(chosen)]
        level = {path: likely[path] for path in best}
        chosen |= set(best)
        if len(best[0]) == 9:
            break
    return chosen


def test_clover_spends_its_nodes_level_by_level_on_likely_children() -> None:
    depths = []
    for seed in range(30):
        growth = Selection(nodes=1 + seed % 13, top_p=(0.95, 0.3)[seed % 2], ratio=(0.25, 0.8, 0.0)[seed % 3])
        drafter, seq = begun(growth, (GREEDY, WARM)[seed % 2], seed=seed)
        tree = run_sync(drafter.propose(seq, Budget(64, 9)))
        assert len(tree) - 1 <= growth.nodes
        assert set(paths(tree)) == selected(drafter, seq, growth)
        depths.append(int(tree.depths.max()))
    assert len(set(depths)) > 2


@dataclass(frozen=True)
class Taciturn(TreeDrafter):
    """Knows these tokens alone, whatever came before."""

    known: tuple[int, ...] = ()

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        rows = torch.full((len(nodes), seq.request.vocab_size), -torch.inf)
        rows[:, list(self.known)] = torch.arange(len(self.known), dtype=torch.float32)
        return rows


@pytest.mark.parametrize(("known", "tree", "chain"), [((), 0, 0), ((3,), 3, 3), ((3, 1), 6, 3)])
def test_what_a_drafter_lacks_is_not_drafted(known: tuple[int, ...], tree: int, chain: int) -> None:
    for growth, nodes in ((EAGLE2(nodes=6, width=4, depth=3), tree), (None, chain)):
        drafter = Taciturn(tree_policy=growth, known=known) if growth else Taciturn(length=3, known=known)
        _, seq = begun(None, GREEDY)
        drafted = run_sync(drafter.propose(seq, Budget(64, 3)))
        assert len(drafted) == nodes + 1
        assert set(drafted.tokens[1:].tolist()) <= set(known)

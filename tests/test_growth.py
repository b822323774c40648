"""Growth policies against slow and obvious counterparts, and the n-gram drafter they can grow trees with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np
import pytest
import torch

from decodery.budget.base import Budget
from decodery.core import noise
from decodery.core.ask import drive
from decodery.core.sequence import Sequence
from decodery.core.trace import Step, Trace
from decodery.core.tree import TokenTree
from decodery.decode.engine import Engine
from decodery.decode.request import Request
from decodery.draft.base import Expander
from decodery.draft.draft_model import DraftModel
from decodery.draft.growth.base import Growth
from decodery.draft.growth.dyspec import DySpec
from decodery.draft.growth.eagle_2 import EAGLE2
from decodery.draft.growth.fixed_tree import EAGLE, FixedTree
from decodery.draft.growth.k_chains import KChains
from decodery.draft.growth.rsd_c import RSDC
from decodery.draft.growth.rsd_s import RSDS, perturbed
from decodery.draft.growth.sequoia import Optimum, Sequoia, acceptance_by_rank, best_tree, fastest_tree
from decodery.draft.growth.specinfer import SpecInfer
from decodery.draft.ngram import NGram
from decodery.draft.shapes.growing import Growing
from decodery.draft.shapes.template import Template
from decodery.errors import SettingsError
from decodery.model.batch import Batch, Scores
from decodery.registry import methods, resolve
from decodery.sample import Sampler
from decodery.testing import TableModel, check_distribution, decode, tiny_transformer
from decodery.verify.base import Rule
from decodery.verify.coupled import Coupled
from decodery.verify.exact import Tests, recursive_law
from decodery.verify.k_seq import KSeq, k_seq_law
from decodery.verify.recursive_rejection import RecursiveRejection, without_replacement

TABLE = TableModel(3, seed=7)
GREEDY, WARM = Sampler.from_settings(), Sampler.from_settings(temperature=0.8)
SAMPLERS = {"greedy": GREEDY, "warm": WARM}
GROWTHS: dict[str, Growth] = {
    "fixed-tree": FixedTree(),
    "specinfer": SpecInfer((3, 2, 2)),
    "k-chains": KChains(3, 4),
    "sequoia": Sequoia(),
    "eagle-2": EAGLE2(width=4),
    "dyspec": DySpec(),
    "dyspec, by level": DySpec(threshold=0.02),
    "rsd-c": RSDC((3, 2, 2)),
    "rsd-s": RSDS(4, 4),
}


@dataclass(frozen=True)
class Drawing(Coupled):
    """Takes no notice of the distributions it asks for: drafts are drawn as for rules that compare with them."""

    uses_draft_distributions = True


def begun(
    growth: Growth | None, sampler: Sampler = WARM, *, rule: Rule | None = None, seed: int = 0, vocab: int = 6
) -> tuple[DraftModel, Sequence]:
    """A drafter of a random table's and a sequence that has read its prompt."""
    drafter = DraftModel(TableModel(vocab, seed=seed, order=3), growth=growth)
    engine = Engine(TableModel(vocab, seed=seed + 1000))
    settings = {"sampler": sampler, "drafter": drafter, "rule": rule or Coupled(), "seed": seed}
    seq = engine.submit(Request([1, 2, seed % vocab], max_new_tokens=40, **settings))  # type: ignore[arg-type]
    engine.step()
    return drafter, seq


def path_tokens(tree: TokenTree) -> dict[int, tuple[int, ...]]:
    return {node: tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return list(path_tokens(tree).values())[1:]


def law_after(drafter: Expander, seq: Sequence, path: tuple[int, ...], *, shaped: bool = True) -> np.ndarray:
    """Log-probabilities [vocab] after a path, asked for alone."""
    tree = TokenTree.chain(seq.pending, path)
    return drive(drafter.expand(seq, tree, [len(path)], shaped=shaped))[0].double().numpy()


def noise_after(seq: Sequence, path: tuple[int, ...]) -> np.ndarray:
    """What the children of a path are drawn with."""
    tokens = torch.arange(seq.vocab_size)
    if not seq.rule.uses_draft_distributions:
        return noise.gumbel(seq.seed, seq.position + len(path), tokens).numpy()
    place = noise.mix(seq.position)
    for token in path:
        place = noise.mix(place, token)
    return noise.gumbel(seq.seed, place, tokens, noise.DRAFT).numpy()


def test_every_policy_is_tested_here() -> None:
    assert {name.partition(",")[0] for name in GROWTHS} == {method.name for method in methods("draft.growth")}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("growth", GROWTHS)
def test_trees_are_trees_within_the_budget(growth: str, sampler: str) -> None:
    for rule in (Coupled(), Drawing()):
        drafter, seq = begun(GROWTHS[growth], SAMPLERS[sampler], rule=rule)
        for nodes, depth in [(1, 1), (1, 9), (2, 2), (5, 1), (8, 3), (16, 2), (64, 9), (3, 64)]:
            tree = drive(drafter.propose(seq, Budget(nodes, depth)))
            tree.validate()
            assert 1 < len(tree) <= nodes + 1 and tree.depths.max() <= depth
            assert tree.origin == drafter.origin
            inner = set(tree.parents[1:].tolist())
            if rule.uses_draft_distributions and tree.origin != "deterministic":
                assert set(tree.distributions) == inner
                for node, law in tree.distributions.items():
                    assert law.dtype == torch.float64 and float(law.sum()) == pytest.approx(1.0, abs=1e-12)
                    expected = law_after(drafter, seq, path_tokens(tree)[node])
                    if not seq.sampler.greedy:
                        assert np.allclose(law, np.exp(expected), atol=1e-6)
            else:
                assert not tree.distributions


@pytest.mark.parametrize("growth", GROWTHS)
def test_nothing_grows_behind_the_end_of_a_text(growth: str) -> None:
    drafter, seq = begun(GROWTHS[growth])
    whole = drive(drafter.propose(seq, Budget(64, 9)))
    ends = int(whole.tokens[1])
    seq.eos_ids = frozenset({ends})
    cut = drive(drafter.propose(seq, Budget(64, 9)))
    assert ends in cut.tokens[1:] and not np.isin(cut.tokens[cut.parents[cut.parents > 0]], [ends]).any()


class Counting(TableModel):
    """Counts its passes and rows."""

    passes = rows = 0

    def forward(self, batch: Batch, **settings: object) -> Scores:
        self.passes, self.rows = self.passes + 1, self.rows + batch.rows
        return super().forward(batch)


@pytest.mark.parametrize("growth", [*GROWTHS, "chain, then branches"])
def test_a_level_takes_one_pass(growth: str) -> None:
    _, seq = begun(None)
    model = Counting(6, seed=0, order=3)
    drafter = DraftModel(model, growth=GROWTHS.get(growth, RSDC((1, 1, 3, 1))))
    seq.draft_state = drafter.start(seq)
    tree = drive(drafter.propose(seq, Budget(40, 6)))
    # Places that are waited for may turn out to lie on levels already met, which costs the heap a few passes more.
    assert model.passes <= tree.depths.max() + (2 if growth == "dyspec" else 0)
    again = drive(drafter.propose(seq, Budget(40, 6)))
    assert again.tokens.tolist() == tree.tokens.tolist() and again.parents.tolist() == tree.parents.tolist()


def test_what_a_node_draws_is_the_requests_noise_or_its_own() -> None:
    for rule in (Coupled(), Drawing()):
        for seed in range(5):
            drafter, seq = begun(RSDC((3, 3, 2)), rule=rule, seed=seed)
            tree = drive(drafter.propose(seq, Budget(64, 9)))
            for node, path in path_tokens(tree).items():
                if len(children := tree.children(node)):
                    scores = law_after(drafter, seq, path) + noise_after(seq, path)
                    drawn = np.argsort(-scores)[: len(children)]
                    assert tree.tokens[children].tolist() == drawn.tolist()


def test_under_the_coupled_rule_a_draft_model_that_is_the_target_is_right_to_the_end() -> None:
    model = tiny_transformer()
    for growth in (RSDC((2, 1, 1)), RSDS(2, 3), Sequoia(nodes=6), DySpec(nodes=8), SpecInfer((2, 1, 1)), KChains(2, 3)):
        for sampler in SAMPLERS.values():
            drafter = DraftModel(model, growth=growth)
            (run,) = decode(model, [[1, 2, 3]], drafter=drafter, sampler=sampler, max_new_tokens=13)
            assert all(rank == 0 for step in run.trace.decoding for rank, _ in step.choices)


# The law under recursive rejection


@dataclass(frozen=True)
class Everywhere(Expander):
    """Expects the same after every node."""

    weights: tuple[float, ...] = (0.5, 0.3, 0.2)

    def logits(self, seq: Sequence, tree: TokenTree, nodes: Ordered[int]) -> torch.Tensor:
        return torch.tensor([self.weights] * len(nodes), dtype=torch.float64).log()


class Script:
    """Stands in for the noise: every node's children come in an order that is looked up, one combination after another.

    Of single draws only the first of an order counts. Nodes that share their noise share the order too, which is right
    where they share the law.
    """

    def __init__(self) -> None:
        self.choices: list[int] = []
        self.mass = 1.0
        self._orders: dict[int, tuple[int, ...]] = {}
        self._last = 5  # of the orders of three tokens

    def topk(
        self, laws: torch.Tensor, k: int, seed: int, positions: list[int], stream: int
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array([self._order(law, position) for law, position in zip(laws, positions, strict=True)])[:, :k]
        return ids, np.zeros(ids.shape)

    def argmax(self, laws: torch.Tensor, seed: int, positions: list[int], stream: int) -> torch.Tensor:
        self._last = 2
        for law, position in zip(laws.double().exp(), positions, strict=True):
            if position not in self._orders:
                if len(self._orders) == len(self.choices):
                    self.choices.append(0)
                self._orders[position] = (self.choices[len(self._orders)],)
                self.mass *= float(law[self._orders[position][0]])
        return torch.tensor([self._orders[position][0] for position in positions])

    def _order(self, law: torch.Tensor, position: int) -> tuple[int, ...]:
        orders = list(permutations(range(len(law))))
        if position not in self._orders:
            if len(self._orders) == len(self.choices):
                self.choices.append(0)
            self._orders[position] = order = orders[self.choices[len(self._orders)]]
            left = law.double().exp()
            for token in order:
                self.mass *= float(left[token] / left.sum())
                left[token] = 0.0
                if float(left.sum()) < 1e-9:
                    break
        return self._orders[position]

    def next(self) -> bool:
        """Go to the next combination."""
        while self.choices and self.choices[-1] == self._last:
            self.choices.pop()
        if self.choices:
            self.choices[-1] += 1
        self.mass, self._orders = 1.0, {}
        return bool(self.choices)


def recursive(tree: TokenTree, p: torch.Tensor, tokens: list[int], q: torch.Tensor) -> Tests:
    without = tree.origin == "without-replacement"
    return recursive_law(p, without_replacement(tokens, q) if without else ((token, q) for token in tokens))


def k_seq(tree: TokenTree, p: torch.Tensor, tokens: list[int], q: torch.Tensor) -> Tests:
    return k_seq_law(p, tokens, q)


def emitted_pairs(tree: TokenTree, target: TableModel, text: list[int], rule: Callable[..., Tests]) -> np.ndarray:
    """[vocab, vocab] law of the first two tokens that a rule emits with this tree."""
    first, pairs = np.zeros(3), np.zeros((3, 3))

    def law(path: tuple[int, ...]) -> torch.Tensor:
        return target.logits([*text, *path]).softmax(dim=-1)

    def walk(node: int, path: tuple[int, ...], mass: float) -> None:
        children = tree.drawn(node)
        drawn = tree.tokens[children].tolist()
        tests = rule(tree, law(path), drawn, tree.distributions[node]) if children else recursive_law(law(path), [])
        for child, (accept, rest) in zip([*children, -1], tests, strict=True):
            if child < 0:
                emit(path, rest, mass)
            elif len(path) == 1:
                pairs[path[0], tree.tokens[child]] += mass * accept
            else:
                walk(child, (*path, int(tree.tokens[child])), mass * accept)
            mass *= 1 - accept

    def emit(path: tuple[int, ...], rest: torch.Tensor, mass: float) -> None:
        if path:
            pairs[path[0]] += mass * rest.numpy()
        else:
            first[:] += mass * rest.numpy()

    walk(0, (), 1.0)
    return pairs + first[:, None] * np.stack([law((token,)).numpy() for token in range(3)])


def law_error(
    growth: Growth,
    expander: Expander,
    monkeypatch: pytest.MonkeyPatch,
    *,
    turned: bool = False,
    rule: Callable[..., Tests] = recursive,
) -> float:
    """How far the law of the first two tokens, over all that can be drawn, is from the target's."""
    target = TableModel(3, seed=0)
    sampler = Sampler.from_settings(temperature=1.0)
    engine = Engine(target)
    drafter = replace(expander, growth=growth)
    seq = engine.submit(Request([1, 2], sampler=sampler, drafter=drafter, rule=RecursiveRejection()))
    engine.step()
    script, law, total = Script(), np.zeros((3, 3)), 0.0
    monkeypatch.setattr(noise, "gumbel_topk", script.topk)
    monkeypatch.setattr(noise, "gumbel_argmax", script.argmax)
    while True:
        tree = drive(drafter.propose(seq, Budget(64, 2)))
        if turned:
            order = np.lexsort((tree.tokens, tree.parents))
            place = np.empty(len(tree), dtype=np.int64)
            place[order] = np.arange(len(tree))
            parents = np.where(tree.parents[order] >= 0, place[tree.parents[order]], -1)
            laws = {int(place[node]): each for node, each in tree.distributions.items()}
            tree = TokenTree(tree.tokens[order], parents, tree.origin, distributions=laws)
        law += script.mass * emitted_pairs(tree, target, seq.tokens, rule)
        total += script.mass
        if not script.next():
            break
    assert total == pytest.approx(1.0)
    one = target.logits(seq.tokens).softmax(dim=-1).numpy()
    two = np.stack([target.logits([*seq.tokens, token]).softmax(dim=-1).numpy() for token in range(3)])
    return float(np.abs(law - one[:, None] * two).max())


EXACT = [DySpec(nodes=3), DySpec(nodes=5), DySpec(threshold=0.15), RSDC((2, 2)), Sequoia(nodes=4, depth=2)]


@pytest.mark.parametrize("growth", EXACT, ids=str)
def test_whatever_is_drawn_the_target_law_is_emitted(growth: Growth, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(growth, DraftModel(TableModel(3, seed=7)), monkeypatch) < 1e-7
    assert law_error(growth, Everywhere(), monkeypatch) < 1e-7


@pytest.mark.parametrize("growth", [SpecInfer((2, 1)), SpecInfer((1, 2)), KChains(2, 2), KChains(3, 1)], ids=str)
@pytest.mark.parametrize("rule", [recursive, k_seq])
def test_independent_draws_emit_the_target_law(
    growth: Growth, rule: Callable[..., Tests], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert law_error(growth, DraftModel(TableModel(3, seed=7)), monkeypatch, rule=rule) < 1e-7


def test_draws_that_share_their_noise_with_what_is_drawn_below_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = noise.mix
    # A child's place is hashed from its parent's and its token, and that of a further draw must be no child's.
    monkeypatch.setattr(noise, "mix", lambda first, *rest: mix(first, *map(abs, rest)))
    assert law_error(KChains(2, 2), DraftModel(TableModel(3, seed=7)), monkeypatch, rule=k_seq) > 1e-3


def test_siblings_out_of_draw_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(RSDC((2, 2)), DraftModel(TableModel(3, seed=7)), monkeypatch, turned=True) > 0.01


def test_noise_shared_by_nodes_of_a_tree_shaped_by_what_was_drawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(growing: Growing, nodes: np.ndarray) -> tuple[list[int], int]:
        return growing.depths[nodes].tolist(), noise.TOKEN

    monkeypatch.setattr(Growing, "_noise", shared)
    assert law_error(DySpec(nodes=5), Everywhere(), monkeypatch) > 1e-3


@pytest.mark.parametrize(
    ("growth", "rule"),
    [("rsd-s", RecursiveRejection()), ("specinfer", RecursiveRejection()), ("k-chains", KSeq())],
    ids=["rsd-s", "specinfer", "k-chains"],
)
def test_texts_keep_their_law(growth: str, rule: Rule) -> None:
    chosen = DraftModel(TABLE, growth=GROWTHS[growth])
    sampler = Sampler.from_settings(temperature=0.7, top_p=0.9)
    check_distribution(TableModel(3), [1, 2], drafter=chosen, rule=rule, sampler=sampler, length=4, draws=500)


# EAGLE-2


def expanded_and_reranked(drafter: Expander, seq: Sequence, growth: EAGLE2) -> list[tuple[int, ...]]:
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


def test_eagle_2_keeps_the_likeliest_of_all_candidates() -> None:
    for seed in range(60):
        growth = EAGLE2(nodes=1 + seed % 17, width=1 + seed % 4, depth=1 + seed % 5)
        drafter, seq = begun(growth, (GREEDY, WARM)[seed % 2], seed=seed)
        tree = drive(drafter.propose(seq, Budget(64, 9)))
        expected = expanded_and_reranked(drafter, seq, growth)
        assert sorted(paths(tree)) == expected
        for node in range(len(tree)):  # siblings are verified from the likeliest on
            tokens = tree.tokens[tree.children(node)]
            law = law_after(drafter, seq, path_tokens(tree)[node], shaped=False)
            assert (np.diff(law[tokens]) <= 0).all()


# Fixed trees


def test_a_fixed_tree_holds_the_likeliest_tokens_at_its_places() -> None:
    drafter, seq = begun(FixedTree(paths=((0,), (1,), (0, 0), (1, 0), (1, 1))))
    ranked = {path: np.argsort(-law_after(drafter, seq, path), kind="stable") for path in [()]}
    first, second = ranked[()][:2].tolist()
    below = [np.argsort(-law_after(drafter, seq, (token,)), kind="stable").tolist() for token in (first, second)]
    expected = {(first,), (second,), (first, below[0][0]), (second, below[1][0]), (second, below[1][1])}
    assert set(paths(drive(drafter.propose(seq, Budget(64, 9))))) == expected


def test_the_published_shape_and_what_a_budget_leaves_of_it() -> None:
    assert np.bincount(EAGLE.depths).tolist() == [1, 4, 8, 8, 3, 2]
    for nodes in (1, 3, 9, 24):
        cut = EAGLE.within(nodes, 3)
        assert len(cut) == min(nodes, 20) and cut.depths.max() <= 3
    assert EAGLE.within(25, 5) is EAGLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fixed-tree(branching=2,paths=0)", "either branching or paths"),
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
    ],
)
def test_a_bad_setting_is_named(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve("draft.growth", text)
    with pytest.raises(SettingsError, match=said):
        resolve("draft", f"ngram:length=2,growth={text if '(' in text else text.replace(':', '(', 1) + ')'}")


# Sequoia


def every_tree(nodes: int, levels: int, width: int) -> Iterator[dict[tuple[int, ...], int]]:
    """All shapes of exactly `nodes` nodes below the root, as counts of children."""
    if nodes == 0:
        yield {}
        return
    if levels == 0:
        return
    for children in range(1, min(width, nodes) + 1):
        yield from ({(): children} | below for below in _forests(nodes - children, children, 0, levels - 1, width))


def _forests(spare: int, children: int, rank: int, levels: int, width: int) -> Iterator[dict[tuple[int, ...], int]]:
    if rank == children:
        if spare == 0:
            yield {}
        return
    for taken in range(spare + 1):
        for one in every_tree(taken, levels, width):
            moved = {(rank, *path): count for path, count in one.items()}
            for others in _forests(spare - taken, children, rank + 1, levels, width):
                yield moved | others


def worth(template: Template, acceptance: tuple[float, ...]) -> float:
    reached = np.ones(len(template.parents))
    for place in range(1, len(reached)):
        reached[place] = reached[template.parents[place]] * acceptance[template.ranks[place]]
    return float(reached.sum())


@pytest.mark.parametrize("acceptance", [(0.6, 0.2, 0.1), (0.3, 0.3, 0.3, 0.05), (0.9,), (0.5, 0.45)])
def test_sequoias_trees_are_the_best_there_are(acceptance: tuple[float, ...]) -> None:
    for levels in (1, 2, 3, 6):
        optimum = Optimum(acceptance, 6, levels)
        for nodes in range(7):
            shapes = [Template(counts) for counts in every_tree(nodes, levels, len(acceptance))] if nodes else []
            best = max((worth(shape, acceptance) for shape in shapes), default=1.0 if nodes == 0 else -np.inf)
            assert optimum.expected[levels, nodes + 1] == pytest.approx(best, abs=1e-12)
            if nodes and shapes:
                found = optimum.template(levels, nodes + 1)
                assert len(found) == nodes and found.depths.max() <= levels
                assert worth(found, acceptance) == pytest.approx(best, abs=1e-12)


def test_sequoia_expects_what_walks_through_its_tree_emit() -> None:
    acceptance = (0.6, 0.2, 0.1)
    tree, random = best_tree(acceptance, 20, 8), np.random.default_rng(0)
    emitted = 0
    for _ in range(4000):
        node = 0
        while True:
            emitted += 1
            rank = int(np.searchsorted(np.cumsum(acceptance), random.random(), side="right"))
            below = np.flatnonzero((tree.parents == node) & (tree.ranks == rank))
            if not len(below):
                break
            node = int(below[0])
    assert emitted / 4000 == pytest.approx(worth(tree, acceptance), rel=0.03)


def test_sequoia_weighs_what_passes_cost() -> None:
    acceptance = (0.6, 0.2, 0.1)
    flat, steep = (1.0,) * 70, tuple(float(rows) for rows in range(70))
    assert len(fastest_tree(acceptance, 60, 8, 0.0, flat)) == 60
    assert len(fastest_tree(acceptance, 60, 8, 0.0, steep)) == 0
    deep, shallow = (fastest_tree(acceptance, 60, 8, cost, flat) for cost in (0.01, 1.0))
    assert deep.depths.max() > shallow.depths.max()
    candidates = [
        (worth(Template(counts), acceptance) / (levels * 0.3 + 1.0 + 0.05 * (nodes + 1)), counts)
        for nodes in range(1, 6)
        for levels in range(1, 4)
        for counts in every_tree(nodes, levels, 3)
    ]
    rising = tuple(1.0 + 0.05 * rows for rows in range(7))
    found = fastest_tree(acceptance, 5, 3, 0.3, rising)
    speed = worth(found, acceptance) / (found.depths.max() * 0.3 + rising[len(found) + 1])
    assert speed == pytest.approx(max(speed for speed, _ in candidates))
    # Through the loop, whose pass times are even here: the deepest tree pays.
    drafter = DraftModel(TableModel(6, seed=3), growth="sequoia(nodes=9,draft_cost=0.0)")
    assert drafter.weighs_cost
    (run,) = decode(TableModel(6, seed=3), [[1, 2]], drafter=drafter, max_new_tokens=20)
    assert {step.nodes for step in run.trace.decoding[:2]} == {9}


def test_acceptance_is_measured_from_traces() -> None:
    trace = Trace()
    for choices in ([(0, 3), (1, 3), (-1, 1)], [(0, 2)], [(2, 3)]):
        trace.steps.append(Step(3, 1, 2, 4, False, 0, 0, 0, 0, choices=choices))
    assert acceptance_by_rank([trace], width=4) == pytest.approx((2 / 5, 1 / 4, 1 / 4))
    trace.steps.append(Step(3, 1, 2, 4, True, 0, 0, 0, 0, choices=[(0, 3)] * 9))  # a prefill pass does not count
    assert acceptance_by_rank([trace], width=2)[0] == pytest.approx(2 / 5)
    with pytest.raises(SettingsError, match="no draft was accepted"):
        acceptance_by_rank([Trace()])


def test_traces_tell_which_child_was_accepted() -> None:
    model = TableModel(4, seed=5)
    (plain,) = decode(model, [[1, 2]], max_new_tokens=30)
    drafter = DraftModel(TableModel(4, seed=8), growth=FixedTree(branching=(3, 2)))
    (run,) = decode(model, [[1, 2]], drafter=drafter, max_new_tokens=30)
    assert run.generated == plain.generated
    ranks = [rank for step in run.trace.decoding for rank, _ in step.choices]
    assert sum(rank >= 0 for rank in ranks) == sum(step.accepted for step in run.trace.decoding)
    assert {0, 1, -1} <= set(ranks)
    assert {offered for step in run.trace.decoding[:3] for _, offered in step.choices} <= {3, 2}


# DySpec


def one_by_one(drafter: Expander, seq: Sequence, nodes: int, depth: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """DySpec's pseudo-code: a residual per node, the place worth most is drawn from, one draft pass per node."""
    residual: dict[tuple[int, ...], np.ndarray] = {}

    def opened(path: tuple[int, ...]) -> None:
        law = law_after(drafter, seq, path)
        if seq.sampler.greedy:
            law = law / 0.6 - np.logaddexp.reduce(law / 0.6)
        residual[path] = np.exp(law)

    opened(())
    places, drawn, worths, pushed = [(1.0, 0, ())], [], [], 1
    while places and len(drawn) < nodes:
        place = max(places, key=lambda each: (each[0], -each[1]))
        places.remove(place)
        value, _, path = place
        law = residual[path]
        with np.errstate(divide="ignore"):
            scores = np.log(law) + (0.0 if seq.sampler.greedy else noise_after(seq, path))
        token = int(scores.argmax())
        drawn.append((*path, token))
        worths.append(value)
        if len(path) + 1 < depth:
            opened((*path, token))
            places.append((value * law[token], pushed, (*path, token)))
        if law[token] < 1 - 1e-9:
            places.append((value * (1 - law[token]), pushed + 1, path))
            law = law.copy()
            law[token] = 0.0
            residual[path] = law / law.sum()
        pushed += 2
    return drawn, worths


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("rule", [Coupled(), Drawing()], ids=["request's noise", "own noise"])
def test_dyspec_grows_the_tree_of_the_one_by_one_algorithm(sampler: str, rule: Rule) -> None:
    for seed in range(12):
        drafter, seq = begun(DySpec(nodes=3 + 2 * seed), SAMPLERS[sampler], rule=rule, seed=seed)
        tree = drive(drafter.propose(seq, Budget(64, 4)))
        expected, worths = one_by_one(drafter, seq, 3 + 2 * seed, 4)
        assert paths(tree) == expected
        assert (np.diff(worths) <= 1e-12).all()


def test_dyspecs_places_are_worth_most_together() -> None:
    for seed in range(4):
        drafter, seq = begun(DySpec(nodes=5), seed=seed, vocab=3)
        tape, worths = one_by_one(drafter, seq, 39, 3)  # every place there is, in an order of closed sets
        known = dict(zip(tape, worths, strict=True))
        first: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for path in tape:
            first.setdefault(path[:-1], []).append(path)

        def needs(path: tuple[int, ...], siblings: dict = first) -> list[tuple[int, ...]]:
            """What must be drawn before it."""
            row = siblings[path[:-1]]
            before = row[: row.index(path)][-1:]
            return before + ([path[:-1]] if len(path) > 1 else [])

        best = max(
            sum(known[path] for path in chosen)
            for chosen in combinations(tape[:16], 5)
            if all(need in chosen for path in chosen for need in needs(path))
        )
        got = sum(known[path] for path in paths(drive(drafter.propose(seq, Budget(64, 3)))))
        assert got == pytest.approx(best)


def test_the_threshold_decides_before_the_draw() -> None:
    for seed in range(8):
        threshold = 0.02 + 0.03 * seed
        drafter, seq = begun(DySpec(nodes=64, threshold=threshold), seed=seed)
        expected: list[tuple[int, ...]] = []
        frontier = [((), 1.0)]
        while frontier:
            following = []
            for path, value in frontier:
                law, left = np.exp(law_after(drafter, seq, path)), 1.0
                order = iter(np.argsort(-(np.log(law) + noise_after(seq, path))).tolist())
                while value * left > threshold + 1e-12 and (token := next(order, None)) is not None:
                    following.append(((*path, token), value * law[token]))
                    left -= law[token]
            expected += [path for path, _ in following]
            frontier = [each for each in following if len(each[0]) < 5]
        assert paths(drive(drafter.propose(seq, Budget(64, 5)))) == expected[:64]


# RSD


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
        tree = drive(drafter.propose(seq, Budget(64, 9)))
        assert [p for depth in (1, 2, 3) for p in sorted(p for p in paths(tree) if len(p) == depth)] == expected


def test_perturbed_children_never_exceed_their_parent() -> None:
    random = np.random.default_rng(0)
    above = random.gumbel(size=200) * 5
    values = -np.sort(-random.gumbel(size=(200, 7)) * 5, axis=1)
    values[::9, 5:] = -np.inf
    found = perturbed(above, values)
    assert np.abs(found[:, 0] - above).max() < 1e-9
    assert (np.diff(found[:, :5], axis=1) <= 0).all() and (found[::9, 5:] == -np.inf).all()


def test_a_greedy_request_searches_with_a_plain_beam() -> None:
    drafter, seq = begun(RSDS(width=2, depth=2), GREEDY)
    laws = {(): law_after(drafter, seq, ())}
    first = np.argsort(-laws[()])[:2].tolist()
    pairs = {(a, b): laws[()][a] + law_after(drafter, seq, (a,))[b] for a in first for b in range(6)}
    expected = {(a,) for a in first} | set(sorted(pairs, key=lambda pair: -pairs[pair])[:2])
    assert set(paths(drive(drafter.propose(seq, Budget(64, 9))))) == expected


# SpecInfer


def test_specinfer_draws_independently_and_merges_what_is_equal() -> None:
    counts = np.zeros((3, 3))
    drafter, seq = begun(SpecInfer((2,)), rule=Drawing(), vocab=3)
    merged = 0
    for seed in range(3000):
        seq.seed = seed
        tree = drive(drafter.propose(seq, Budget(64, 9)))
        drawn = tree.tokens[tree.drawn(0)]
        assert len(drawn) == 2
        merged += len(tree) == 2
        counts[drawn[0], drawn[1]] += 1
    law = np.exp(law_after(drafter, seq, ()))
    expected = np.outer(law, law) * 3000
    assert merged == counts.trace() > 0
    assert ((counts - expected) ** 2 / expected).sum() < 26  # chi-square, 8 degrees: p = 0.001


# SpecTr


def test_every_chain_is_drawn_to_its_end() -> None:
    for seed in range(40):
        drafter, seq = begun(KChains(5, 4), rule=Drawing(), seed=seed, vocab=3)
        tree = drive(drafter.propose(seq, Budget(64, 9)))
        through = {0: 5}
        for node in range(len(tree)):
            draws = tree.drawn(node)
            assert len(draws) == (through[node] if tree.depths[node] < 4 else 0)
            through |= {child: draws.count(child) for child in draws}
        assert sum(through[node] for node in np.flatnonzero(tree.depths == 4).tolist()) == 5


def test_small_budgets_cut_chains_then_tokens() -> None:
    for nodes, (k, length) in {64: (5, 4), 19: (4, 4), 7: (1, 4), 3: (1, 3)}.items():
        drafter, seq = begun(KChains(5, 4), rule=Drawing())
        tree = drive(drafter.propose(seq, Budget(nodes, 9)))
        assert (len(tree.drawn(0)), tree.depths.max()) == (k, length) and len(tree) <= nodes + 1
    drafter, seq = begun(KChains(5, 4), GREEDY)
    assert drive(drafter.propose(seq, Budget(64, 9))).parents.tolist() == [-1, 0, 1, 2, 3]


# The n-gram drafter


def test_ngram_rows_are_distributions_of_what_was_expected() -> None:
    model = tiny_transformer()
    drafter = NGram(scope="request", smoothing=0.2, width=8)
    engine = Engine(model)
    seq = engine.submit(Request([5] * 6 + [7, 8, 9] * 4, drafter=drafter, max_new_tokens=30))
    for _ in range(6):
        engine.step()
    store = seq.draft_state
    tree = TokenTree.from_paths(seq.pending, [(7, 8, 9), (60, 61), (7, 9)])
    rows = drive(drafter.logits(seq, tree, [3, 0, 4, 2])).double().exp()
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

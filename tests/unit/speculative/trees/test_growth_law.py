"""Grown trees under rules that draw: what is emitted follows the target's law, by enumeration and by draws."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pytest
import torch

from decodery.core import noise
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.speculative.acceptance.exact import Tests, recursive_law
from decodery.speculative.acceptance.k_seq import KSeq, k_seq_law
from decodery.speculative.acceptance.recursive_rejection import RecursiveRejection, without_replacement
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.tree_building.growing import Growing
from decodery.speculative.trees.dyspec import DySpec
from decodery.speculative.trees.k_chains import KChains
from decodery.speculative.trees.rsd_c import RSDC
from decodery.speculative.trees.rsd_s import RSDS
from decodery.speculative.trees.sequoia import Sequoia
from decodery.speculative.trees.specinfer import SpecInfer
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy
from decodery.testing import TableModel, check_distribution
from sharp import Sharp


@dataclass(frozen=True)
class Everywhere(TreeDrafter):
    """Expects the same after every node."""

    weights: tuple[float, ...] = (0.5, 0.3, 0.2)

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
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


def recursive(tree: DraftTree, p: torch.Tensor, tokens: list[int], q: torch.Tensor) -> Tests:
    without = tree.origin == "without-replacement"
    return recursive_law(p, without_replacement(tokens, q) if without else ((token, q) for token in tokens))


def k_seq(tree: DraftTree, p: torch.Tensor, tokens: list[int], q: torch.Tensor) -> Tests:
    return k_seq_law(p, tokens, q)


def emitted_pairs(tree: DraftTree, target: TableModel, text: list[int], rule: Callable[..., Tests]) -> np.ndarray:
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
    growth: TreePolicy,
    expander: TreeDrafter,
    monkeypatch: pytest.MonkeyPatch,
    *,
    turned: bool = False,
    rule: Callable[..., Tests] = recursive,
) -> float:
    """How far the law of the first two tokens, over all that can be drawn, is from the target's."""
    target = TableModel(3, seed=0)
    sampler = Sampler.from_settings(temperature=1.0)
    engine = Engine(target)
    drafter = replace(expander, tree_policy=growth)
    seq = engine.submit(Request([1, 2], sampler=sampler, drafter=drafter, acceptance_rule=RecursiveRejection()))
    engine.step()
    script, law, total = Script(), np.zeros((3, 3)), 0.0
    monkeypatch.setattr(noise, "gumbel_topk", script.topk)
    monkeypatch.setattr(noise, "gumbel_argmax", script.argmax)
    while True:
        tree = run_sync(drafter.propose(seq, Budget(64, 2)))
        if turned:
            order = np.lexsort((tree.tokens, tree.parents))
            place = np.empty(len(tree), dtype=np.int64)
            place[order] = np.arange(len(tree))
            parents = np.where(tree.parents[order] >= 0, place[tree.parents[order]], -1)
            laws = {int(place[node]): each for node, each in tree.distributions.items()}
            tree = DraftTree(tree.tokens[order], parents, tree.origin, distributions=laws)
        law += script.mass * emitted_pairs(tree, target, seq.tokens, rule)
        total += script.mass
        if not script.next():
            break
    assert total == pytest.approx(1.0)
    one = target.logits(seq.tokens).softmax(dim=-1).numpy()
    two = np.stack([target.logits([*seq.tokens, token]).softmax(dim=-1).numpy() for token in range(3)])
    return float(np.abs(law - one[:, None] * two).max())


EXACT = [DySpec(nodes=3), DySpec(nodes=4), DySpec(threshold=0.25), RSDC((2, 2)), Sequoia(nodes=4, depth=2)]


@pytest.mark.parametrize("growth", EXACT, ids=str)
def test_whatever_is_drawn_the_target_law_is_emitted(growth: TreePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(growth, DraftModel(TableModel(3, seed=7)), monkeypatch) < 1e-7
    assert law_error(growth, Everywhere(), monkeypatch) < 1e-7


@pytest.mark.parametrize("growth", [SpecInfer((2, 1)), SpecInfer((1, 2)), KChains(2, 2), KChains(3, 1)], ids=str)
@pytest.mark.parametrize("rule", [recursive, k_seq])
def test_independent_draws_emit_the_target_law(
    growth: TreePolicy, rule: Callable[..., Tests], monkeypatch: pytest.MonkeyPatch
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
    assert law_error(DySpec(nodes=4), Everywhere(), monkeypatch) > 1e-3


@pytest.mark.parametrize(
    ("growth", "rule"),
    [(RSDS(3, 2), RecursiveRejection()), (SpecInfer((2, 2)), RecursiveRejection()), (KChains(2, 3), KSeq())],
    ids=["rsd-s", "specinfer", "k-chains"],
)
def test_texts_keep_their_law(growth: TreePolicy, rule: AcceptanceRule) -> None:
    chosen = DraftModel(Sharp(0.6, 0.3, 0.1), tree_policy=growth)
    sampler = Sampler.from_settings(temperature=1.0, top_p=0.95)
    target = Sharp(0.3, 0.6, 0.1)
    check_distribution(target, [1, 0], drafter=chosen, acceptance_rule=rule, sampler=sampler, length=4, draws=120)

"""Verification rules: what each emits at a node, over all draws, and how that compares with the best possible."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.budget.base import Budget
from decodery.core import noise
from decodery.core.sequence import Sequence
from decodery.core.tree import Origin, TokenTree
from decodery.draft.base import Drafter
from decodery.draft.draft_model import DraftModel
from decodery.sample import Sampler
from decodery.testing import LawBroken, TableModel, check_batch, check_distribution, check_state, tiny_transformer
from decodery.testing.transport import best_acceptance, enumerate_draws, linear_program, node_law
from decodery.verify.recursive_rejection import RecursiveRejection, recursive_law, without_replacement

TARGET, OTHER = TableModel(3, seed=0), TableModel(3, seed=7)
NUCLEUS = Sampler.from_settings(temperature=0.7, top_p=0.9)
Pair = tuple[torch.Tensor, torch.Tensor]


def random_laws(count: int, sizes: tuple[int, ...] = (3, 4, 5, 6), seed: int = 5) -> list[Pair]:
    """Random p and q over few tokens; every fifth p is one-hot, others and some q have zeros, some pairs are equal."""
    random = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        size = sizes[number % len(sizes)]
        p, q = random.dirichlet(np.full(size, 0.5), 2)
        if number % 5 == 0:
            p = np.eye(size)[number % size]
        if number % 5 == 1:
            p[number % size] = 0
        if number % 7 == 0:
            q = np.eye(size)[(number + 1) % size]
        if number % 7 == 1:
            q[(number + 1) % size] = 0
        if number % 11 == 0:
            q = p
        pairs.append((torch.from_numpy(p / p.sum()), torch.from_numpy(q / q.sum())))
    return pairs


def emitted(p: torch.Tensor, q: torch.Tensor, k: int, *, replacement: bool, tests) -> tuple[torch.Tensor, float]:
    """The law of the emitted token over all draws, and the probability of acceptance. tests(p, tokens, q)."""
    law, accepted = torch.zeros_like(p), 0.0
    for tokens, mass in enumerate_draws(q, k, replacement=replacement):
        given, chance = node_law(tests(p, tokens, q), tokens)
        law, accepted = law + mass * given, accepted + mass * chance
    return law, accepted


def with_replacement(p, tokens, q):
    return recursive_law(p, [(token, q) for token in tokens])


def each_without(p, tokens, q):
    return recursive_law(p, without_replacement(tokens, q))


RECURSIVE = {True: with_replacement, False: each_without}


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_recursive_rejection_emits_the_target_law(k: int, replacement: bool) -> None:
    for p, q in random_laws(50):
        law, _ = emitted(p, q, k, replacement=replacement, tests=RECURSIVE[replacement])
        assert (law - p).abs().max() < 1e-12


def test_recursive_rejection_with_a_draft_law_per_sibling() -> None:
    for (p, first), (_, second) in itertools.pairwise(random_laws(41, (4,))):
        law = torch.zeros_like(p)
        for a, b, c in itertools.product(range(4), repeat=3):
            mass = float(first[a] * second[b] * first[c])
            law += mass * node_law(recursive_law(p, [(a, first), (b, second), (c, first)]), (a, b, c))[0]
        assert (law - p).abs().max() < 1e-12


def test_recursive_rejection_of_point_masses() -> None:
    for p, _ in random_laws(30, (5,)):
        for tokens in ((), (2,), (4, 0), (0, 1, 2, 3, 4)):
            law, chance = node_law(recursive_law(p, [(token, None) for token in tokens]), tokens)
            assert (law - p).abs().max() < 1e-12
            assert chance == pytest.approx(float(p[list(tokens)].sum()), abs=1e-12)


def sorted_by_probability(p, tokens, q):
    return sorted(tokens, key=lambda token: -float(q[token])), without_replacement


def draft_law_of_the_first(p, tokens, q):
    return tokens, lambda tokens, q: [(token, q) for token in tokens]


@pytest.mark.parametrize("wrong", [sorted_by_probability, draft_law_of_the_first])
def test_wrong_draft_laws_are_caught(wrong) -> None:
    # Siblings out of draw order, or tested against a q that still holds the siblings before them.
    worst = 0.0
    for p, q in random_laws(20, (4,)):
        law = torch.zeros_like(p)
        for drawn, mass in enumerate_draws(q, 2, replacement=False):
            tokens, laws = wrong(p, drawn, q)
            law += mass * node_law(recursive_law(p, laws(tokens, q)), tokens)[0]
        worst = max(worst, float((law - p).abs().max()))
    assert worst > 0.03


def test_a_bonus_from_the_whole_target_is_caught() -> None:
    p, q = random_laws(3, (4,), seed=2)[2]
    law, _ = emitted(p, q, 2, replacement=True, tests=lambda *given: [*list(with_replacement(*given))[:-1], (0.0, p)])
    assert (law - p).abs().max() > 0.03


def test_the_bound_is_the_linear_program() -> None:
    for p, q in random_laws(40, (3, 4, 5)):
        for k in (1, 2, 3):
            bound = best_acceptance(p.numpy(), q.numpy(), k)
            assert bound == pytest.approx(linear_program(p.numpy(), q.numpy(), k), abs=1e-7)
        assert best_acceptance(p.numpy(), q.numpy(), 1) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_recursive_rejection_accepts_no_more_than_can_be(replacement: bool) -> None:
    gained = 0.0
    for p, q in random_laws(30, (4,)):
        for k in (1, 2, 3):
            _, accepted = emitted(p, q, k, replacement=replacement, tests=RECURSIVE[replacement])
            bound = linear_program(p.numpy(), q.numpy(), k, replacement=replacement)
            assert accepted <= bound + 1e-7
            gained = max(gained, bound - accepted)
    assert gained > 0.01


DRAFT = DraftModel(OTHER)


@dataclass(frozen=True)
class Branching(Drafter):
    """Draws `widths[depth]` children for every node, or for every draw of it where equal draws become one child."""

    origin: Origin = "sampled"  # type: ignore[misc]
    widths: tuple[int, ...] = (2, 2)
    model: DraftModel = DRAFT

    def start(self, seq: Sequence) -> Any:
        return self.model.start(seq)

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        tree, layer, copies = TokenTree.root(seq.pending), [0], {0: 1}
        for width in self.widths[: budget.depth]:
            laws = self.model.expand(seq, tree, layer).double().softmax(dim=-1)
            draws, distributions = dict(tree.draws), dict(tree.distributions)
            tokens, parents, following = tree.tokens.tolist(), tree.parents.tolist(), []
            for node, law in zip(layer, laws, strict=True):
                distributions[node], found = law, {}
                for token in self._drawn(law, width * copies[node], noise.mix(seq.seed, len(seq.tokens), node)):
                    if token not in found:
                        found[token] = len(tokens)
                        following.append(len(tokens))
                        tokens.append(token)
                        parents.append(node)
                    child = found[token]
                    draws.setdefault(node, []).append(child)
                    copies[child] = copies.get(child, 0) + 1
            tree = TokenTree(np.array(tokens), np.array(parents), self.origin, None, distributions, draws)
            layer = [node for node in following if int(tree.tokens[node]) not in seq.eos_ids]
        return tree

    def _drawn(self, law: torch.Tensor, count: int, seed: int) -> list[int]:
        tokens = torch.arange(len(law))
        if self.origin == "without-replacement":
            keys = law.log() + noise.gumbel(seed, 0, tokens, noise.GUESS)
            return keys.argsort(descending=True)[: min(count, int((law > 0).sum()))].tolist()
        return noise.gumbel_argmax(law.log().expand(count, -1), seed, range(count), noise.GUESS).tolist()


@dataclass(frozen=True)
class Mistaken(Branching):
    """Says of draws without replacement that they were independent."""

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        return replace(super().propose(seq, budget), origin="sampled")


@pytest.mark.parametrize("origin", ["sampled", "without-replacement"])
def test_recursive_rejection_keeps_the_law_of_a_text(origin: Origin) -> None:
    check_distribution(
        *(TARGET, [1, 2]), drafter=Branching(origin), rule=RecursiveRejection(), sampler=NUCLEUS, length=4, draws=1000
    )


def test_draws_verified_as_what_they_are_not_are_caught() -> None:
    with pytest.raises(LawBroken, match="enumerated law"):
        check_distribution(
            *(TARGET, [1, 2]),
            drafter=Mistaken("without-replacement"),
            rule=RecursiveRejection(),
            length=4,
            draws=1000,
            least=1e-6,
        )


@pytest.mark.parametrize("origin", ["sampled", "without-replacement"])
def test_branching_drafts_leave_batches_and_caches_in_order(origin: Origin) -> None:
    drafter = Branching(origin, (3, 2, 1), DraftModel(tiny_transformer(0, num_layers=1)))
    prompts = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
    settings = {"drafter": drafter, "rule": RecursiveRejection(), "sampler": NUCLEUS}
    check_batch(tiny_transformer(0), prompts, seeds=(0,), **settings)
    check_state(tiny_transformer(0), prompts, max_new_tokens=12, **settings)

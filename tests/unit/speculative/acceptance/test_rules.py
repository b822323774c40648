"""Verification rules: what each emits at a node, over all draws, and how that compares with the best possible."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core import noise
from decodery.core.requirements import Provides, Requirements
from decodery.sampling import Sampler
from decodery.speculative.acceptance.exact import recursive_law
from decodery.speculative.acceptance.k_seq import KSeq, discount, k_seq_law
from decodery.speculative.acceptance.recursive_rejection import RecursiveRejection, without_replacement
from decodery.speculative.acceptance.typical import Typical, threshold
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree, Origin
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.testing import (
    LawBroken,
    TableModel,
    check_batch,
    check_distribution,
    check_identical,
    check_state,
    decode,
    tiny_transformer,
    to_int8,
)
from decodery.testing.transport import best_acceptance, enumerate_draws, linear_program, node_law
from sharp import Sharp

TARGET, OTHER = Sharp(0.02, 0.9, 0.08), Sharp(0.9, 0.05, 0.05)
"""A second draw without replacement is even where a rest is not, which tells origins apart."""
NUCLEUS = Sampler.from_settings(temperature=1.0, top_p=0.95)
PENALISED = Sampler.from_settings(temperature=1.0, top_p=0.95, repetition_penalty=1.2)
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
    for p, q in random_laws(50 if k < 3 else 25):
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
    for p, q in random_laws(20, (3, 4, 5)):
        for k in (1, 2, 3):
            bound = best_acceptance(p.numpy(), q.numpy(), k)
            assert bound == pytest.approx(linear_program(p.numpy(), q.numpy(), k), abs=1e-7)
        assert best_acceptance(p.numpy(), q.numpy(), 1) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_k_seq_emits_the_target_law_and_accepts_what_it_says(k: int) -> None:
    for p, q in random_laws((50, 50, 15, 4)[k - 1]):
        law, accepted = emitted(p, q, k, replacement=True, tests=k_seq_law)
        rho, beta = discount(p, q, k)
        assert (law - p).abs().max() < 1e-12
        assert accepted == pytest.approx(1 - (1 - beta) ** k, abs=1e-12)
        assert rho == 1 if k == 1 else 1 <= rho <= k
        assert beta == pytest.approx(float(torch.minimum(q, p / rho).sum()), abs=1e-12)


def test_k_seq_is_within_a_factor_of_the_best() -> None:
    for number, (p, q) in enumerate(random_laws(100, (4,))):
        best = linear_program(p.numpy(), q.numpy(), 2) if number < 25 else best_acceptance(p.numpy(), q.numpy(), 2)
        accepted = 1 - (1 - discount(p, q, 2)[1]) ** 2
        assert (1 - np.exp(-1)) * best - 1e-7 <= accepted <= best + 1e-7


def test_the_discount_is_the_least_that_will_do() -> None:
    for p, q in random_laws(40):
        rho, _ = discount(p, q, 3)
        betas = [float(torch.minimum(q, p / each).sum()) for each in np.linspace(1, 3, 9)]
        assert betas == sorted(betas, reverse=True)
        rising = [each * beta for each, beta in zip(np.linspace(1, 3, 9), betas, strict=True)]
        assert all(after >= before - 1e-12 for before, after in itertools.pairwise(rising))
        smaller = float(torch.minimum(q, p / (rho - 1e-6)).sum())
        assert rho == 1 or smaller == 0 or 1 - (1 - smaller) ** 3 > (rho - 1e-6) * smaller - 1e-12


def test_k_seq_with_another_number_of_draws_is_caught() -> None:
    # The discount belongs to the number of draws that are still alive.
    def wrong(p, tokens, q):
        *accepts, rest = list(k_seq_law(p, (*tokens, tokens[0]), q))
        return [*accepts[:-1], rest]

    worst = 0.0
    for p, q in random_laws(20, (4,)):
        law, _ = emitted(p, q, 2, replacement=True, tests=wrong)
        worst = max(worst, float((law - p).abs().max()))
    assert worst > 0.03


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_recursive_rejection_accepts_no_more_than_can_be(replacement: bool) -> None:
    gained = 0.0
    for p, q in random_laws(15, (4,)):
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

    origin: Origin = "sampled"
    widths: tuple[int, ...] = (2, 2)
    model: DraftModel = DRAFT

    @property
    def provides(self) -> Provides:
        return Provides(drafts=(self.origin,))

    def start(self, seq: Sequence) -> Any:
        seq.states[self.model] = self.model.start(seq)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        tree, layer, copies = DraftTree.root(seq.last_token), [0], {0: 1}
        for width in self.widths[: budget.depth]:
            laws = (yield from self.model.expand(seq, tree, layer)).double().softmax(dim=-1)
            draws, distributions = dict(tree.draws), dict(tree.distributions)
            tokens, parents, following = tree.tokens.tolist(), tree.parents.tolist(), []
            for node, law in zip(layer, laws, strict=True):
                distributions[node], found = law, {}
                for token in self._drawn(law, width * copies[node], noise.mix(seq.request.seed, len(seq.tokens), node)):
                    if token not in found:
                        found[token] = len(tokens)
                        following.append(len(tokens))
                        tokens.append(token)
                        parents.append(node)
                    child = found[token]
                    draws.setdefault(node, []).append(child)
                    copies[child] = copies.get(child, 0) + 1
            tree = DraftTree(np.array(tokens), np.array(parents), self.origin, None, distributions, draws)
            layer = [node for node in following if int(tree.tokens[node]) not in seq.request.eos_ids]
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

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        return replace((yield from super().propose(seq, budget)), origin="sampled")


LOSSLESS = [("sampled", RecursiveRejection()), ("without-replacement", RecursiveRejection()), ("sampled", KSeq())]


@pytest.mark.parametrize(("origin", "rule"), LOSSLESS)
def test_rules_keep_the_law_of_a_text(origin: Origin, rule: AcceptanceRule) -> None:
    sampler = PENALISED if origin == "without-replacement" else NUCLEUS
    check_distribution(
        *(TARGET, [1, 0]), drafter=Branching(origin), acceptance_rule=rule, sampler=sampler, length=4, draws=120
    )


def test_draws_verified_as_what_they_are_not_are_caught() -> None:
    with pytest.raises(LawBroken, match="enumerated law"):
        check_distribution(
            *(TARGET, [1, 0]),
            drafter=Mistaken("without-replacement"),
            acceptance_rule=RecursiveRejection(),
            length=4,
            draws=120,
            least=1e-6,
        )


@pytest.mark.parametrize(("origin", "rule"), [*LOSSLESS, ("sampled", Typical())])
def test_branching_drafts_leave_batches_and_caches_in_order(origin: Origin, rule: AcceptanceRule) -> None:
    target, prompts = to_int8(tiny_transformer(0)), [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
    # Drafts that are mostly rejected, and the target's own.
    for model, tested in ((tiny_transformer(0, num_layers=1), "drafted"), (target, "accepted")):
        drafter = Branching(origin, (3, 2, 1), DraftModel(model))
        settings = {"drafter": drafter, "acceptance_rule": rule, "sampler": NUCLEUS, "max_new_tokens": 8}
        check_batch(target, prompts, seeds=(0,), tested=tested, **settings)
        check_state(target, prompts[1:], **settings)


def test_the_typical_threshold_falls_with_the_entropy() -> None:
    assert threshold(torch.tensor([1.0, 0.0]).double(), 0.09, 0.3) == 0.09
    even = torch.full((8,), 1 / 8).double()
    assert threshold(even, 0.09, 0.3) == pytest.approx(0.3 / 8)
    assert threshold(even, 0.01, 0.3) == 0.01


def test_typical_acceptance_from_nothing_to_everything() -> None:
    target, drafter = tiny_transformer(0), Branching("sampled", (2, 2), DraftModel(tiny_transformer(3)))
    plain = Sampler.from_settings(temperature=1.0)
    runs = {
        rule: decode(target, [[1, 2, 3]], drafter=drafter, acceptance_rule=rule, sampler=plain, max_new_tokens=22)[0]
        for rule in (Typical(1.0, float("inf")), Typical(0.0), Typical())
    }
    nothing, everything, default = (run.trace.decoding for run in runs.values())
    assert {step.accepted for step in nothing} == {0}
    assert {step.accepted for step in everything} == {2}
    assert 0 < sum(step.accepted for step in default) < 2 * len(default)
    # Where nothing is accepted the text is the target's own.
    assert (
        next(iter(runs.values())).generated
        == decode(target, [[1, 2, 3]], sampler=plain, max_new_tokens=22)[0].generated
    )
    check_identical(target, [[1, 2, 3]], drafter=drafter, acceptance_rule=Typical())


def test_typical_acceptance_takes_the_longest_then_the_most_likely_path() -> None:
    table = TableModel(5, order=1, spread=1.0)
    tree = DraftTree.from_paths(0, [(1, 2), (2, 4), (3,), (4, 1)])

    @dataclass(frozen=True)
    class Given(Drafter):
        def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
            return tree if budget.depth >= 2 and seq.last_token == 0 else DraftTree.root(seq.last_token)

    sampler = Sampler.from_settings(temperature=1.0)
    (run,) = decode(
        table, [[0, 1, 0]], drafter=Given(), acceptance_rule=Typical(0.0), sampler=sampler, max_new_tokens=8
    )
    chances = {
        path: sum(float(table.logits(path[:at]).log_softmax(0)[path[at]]) for at in (1, 2))
        for path in ((0, 1, 2), (0, 2, 4), (0, 4, 1))
    }
    taken = [tuple(run.tokens[at : at + 3]) for at in range(3, len(run.tokens) - 2) if run.tokens[at] == 0]
    assert all(path == max(chances, key=lambda each: chances[each]) for path in taken)


def test_rules_get_the_hidden_states_they_tap() -> None:
    seen: list[tuple[int, torch.Tensor]] = []

    @dataclass(frozen=True)
    class Tapping(AcceptanceRule):
        requirements = Requirements(taps=(0, 2))

        def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
            assert set(laws.hidden) == {0, 2} and len(laws.hidden[2]) == len(tree)
            # The logits are those of the last layer's states, row by row.
            assert torch.allclose(target.head(laws.hidden[2]).double(), laws.logits.double(), atol=1e-6)
            seen.append((len(tree), laws.hidden[0]))
            return Accepted([], laws.picks([0])[0])

    target = tiny_transformer(0)
    drafter = Branching("sampled", (2, 2), DraftModel(tiny_transformer(3)))
    decode(target, [[1, 2, 3], [4]], drafter=drafter, acceptance_rule=Tapping(), max_new_tokens=4)
    assert max(nodes for nodes, _ in seen) > 2

"""Growth policies: trees within their budgets, passes per level, and whose noise a node draws with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.core.registry import methods
from decodery.models.batch import Batch, Scores
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.trees.dyspec import DySpec
from decodery.speculative.trees.k_chains import KChains
from decodery.speculative.trees.rsd_c import RSDC
from decodery.speculative.trees.rsd_s import RSDS
from decodery.speculative.trees.sequoia import Sequoia
from decodery.speculative.trees.specinfer import SpecInfer
from decodery.step.draft_length_policy import Budget
from decodery.step.forward_request import run_sync
from decodery.testing import TableModel, decode, tiny_transformer
from grown_trees import GREEDY, GROWTHS, WARM, Drawing, begun, law_after, noise_after, path_tokens

SAMPLERS = {"greedy": GREEDY, "warm": WARM}


def test_every_policy_is_tested_here() -> None:
    assert {name.partition(",")[0] for name in GROWTHS} == {method.name for method in methods("tree-policy")}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("growth", GROWTHS)
def test_trees_are_trees_within_the_budget(growth: str, sampler: str) -> None:
    for rule in (Coupled(), Drawing()):
        drafter, seq = begun(GROWTHS[growth], SAMPLERS[sampler], rule=rule)
        for nodes, depth in [(1, 1), (1, 9), (2, 2), (5, 1), (8, 3), (16, 2), (64, 9), (3, 64)]:
            tree = run_sync(drafter.propose(seq, Budget(nodes, depth)))
            tree.validate()
            assert 1 < len(tree) <= nodes + 1 and tree.depths.max() <= depth
            assert (tree.origin,) == drafter.provides.drafts
            inner = set(tree.parents[1:].tolist())
            if rule.requirements.laws and tree.origin != "deterministic":
                assert set(tree.distributions) == inner
                for node, law in tree.distributions.items():
                    assert law.dtype == torch.float64 and float(law.sum()) == pytest.approx(1.0, abs=1e-12)
                    expected = law_after(drafter, seq, path_tokens(tree)[node])
                    if not seq.request.sampler.greedy:
                        assert np.allclose(law, np.exp(expected), atol=1e-6)
            else:
                assert not tree.distributions


@pytest.mark.parametrize("growth", GROWTHS)
def test_nothing_grows_behind_the_end_of_a_text(growth: str) -> None:
    drafter, seq = begun(GROWTHS[growth])
    whole = run_sync(drafter.propose(seq, Budget(64, 9)))
    ends = int(whole.tokens[1])
    seq.rebind(eos_ids=frozenset({ends}))
    cut = run_sync(drafter.propose(seq, Budget(64, 9)))
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
    drafter = DraftModel(model, tree_policy=GROWTHS.get(growth, RSDC((1, 1, 3, 1))))
    seq.states[drafter] = drafter.start(seq)
    tree = run_sync(drafter.propose(seq, Budget(40, 6)))
    # Places that are waited for may turn out to lie on levels already met, which costs the heap a few passes more.
    assert model.passes <= tree.depths.max() + (2 if growth == "dyspec" else 0)
    again = run_sync(drafter.propose(seq, Budget(40, 6)))
    assert again.tokens.tolist() == tree.tokens.tolist() and again.parents.tolist() == tree.parents.tolist()


def test_what_a_node_draws_is_the_requests_noise_or_its_own() -> None:
    for rule in (Coupled(), Drawing()):
        for seed in range(5):
            drafter, seq = begun(RSDC((3, 3, 2)), rule=rule, seed=seed)
            tree = run_sync(drafter.propose(seq, Budget(64, 9)))
            for node, path in path_tokens(tree).items():
                if len(children := tree.children(node)):
                    scores = law_after(drafter, seq, path) + noise_after(seq, path)
                    drawn = np.argsort(-scores)[: len(children)]
                    assert tree.tokens[children].tolist() == drawn.tolist()


def test_under_the_coupled_rule_a_draft_model_that_is_the_target_is_right_to_the_end() -> None:
    model = tiny_transformer()
    for growth in (RSDC((2, 1, 1)), RSDS(2, 3), Sequoia(nodes=6), DySpec(nodes=8), SpecInfer((2, 1, 1)), KChains(2, 3)):
        for sampler in SAMPLERS.values():
            drafter = DraftModel(model, tree_policy=growth)
            (run,) = decode(model, [[1, 2, 3]], drafter=drafter, sampler=sampler, max_new_tokens=13)
            assert all(rank == 0 for step in run.trace.decoding for rank, _ in step.choices)

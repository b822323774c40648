"""Drafters whose drafts arise in different ways from step to step, under rules that care."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.engine.request import Request
from decodery.sampling import Sampler, Temperature
from decodery.sampling.constraint import Constrained, Constraint
from decodery.speculative.acceptance.rapid import Rapid
from decodery.speculative.acceptance.recursive_rejection import RecursiveRejection
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.drafters.combine import Cascade, Router
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.jacobi import Jacobi
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.trees.k_chains import KChains
from decodery.speculative.trees.rsd_c import RSDC
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence
from decodery.testing import LawBroken, check_distribution, check_identical, decode, tiny_transformer
from sharp import Sharp
from wrong_rules import NoResidual

TARGET, DRAFT = Sharp(0.06, 0.55, 0.34, 0.05), Sharp(0.9, 0.04, 0.03, 0.03)
"""A draft model that is sure of a token that hardly ever comes: it draws it twice, which tells origins apart."""


class Without(Constraint):
    """Excludes one token."""

    def __init__(self, size: int, token: int) -> None:
        self.mask = np.arange(size) != token

    def init(self, prompt: Ordered[int]) -> Any:
        return ()

    def allowed(self, state: Any) -> np.ndarray:
        return self.mask

    def advance(self, state: Any, token: int) -> Any:
        return ()

    def is_complete(self, state: Any) -> bool:
        return True


MASKED = Sampler((Constrained(Without(4, 3)), Temperature(1.0)))


def parity(seq: Sequence) -> int:
    return seq.position % 2


TURNS = Router(
    (DraftModel(DRAFT, tree_policy=RSDC((2, 2))), DraftModel(DRAFT, tree_policy=KChains(2, 2))),
    choose=parity,
)
"""Without replacement at even positions, independent draws at odd ones."""


@dataclass(frozen=True)
class Mislabelled(Forced):
    """Wrong on purpose: every tree is said to have arisen as the strongest of all would."""

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        tree = yield from as_coroutine(super().propose(seq, budget))
        return replace(tree, origin="without-replacement") if tree.distributions else tree


def test_a_tree_behind_forced_tokens_is_verified_as_what_it_is() -> None:
    law: dict[str, Any] = {"acceptance_rule": RecursiveRejection(), "sampler": MASKED, "length": 4, "draws": 150}
    check_distribution(TARGET, [1, 2], drafter=Forced(TURNS), **law)
    with pytest.raises(LawBroken, match="enumerated law"):
        check_distribution(TARGET, [1, 2], drafter=Mislabelled(TURNS), least=1e-6, **law)


def test_first_of_a_lookup_and_a_model_under_rejection_and_a_constraint() -> None:
    prompt = [0, 1, 2, 0, 1, 2, 0, 1]
    drafter = Cascade((PromptLookup(), DraftModel(DRAFT)))
    runs = decode(TARGET, [prompt], drafter=drafter, acceptance_rule=Rejection(), sampler=MASKED, seeds=range(10))
    assert all(3 not in run.generated for run in runs)
    law: dict[str, Any] = {"drafter": drafter, "sampler": MASKED, "length": 4, "draws": 220}
    check_distribution(TARGET, prompt, acceptance_rule=Rejection(), **law)
    with pytest.raises(LawBroken, match="enumerated law"):
        check_distribution(TARGET, prompt, acceptance_rule=NoResidual(), least=1e-6, **law)


def test_the_rule_rapid_wants_drafts_with_their_laws_from_every_part() -> None:
    for drafter in (
        Cascade((PromptLookup(), DraftModel(DRAFT))),
        Router((PromptLookup(), DraftModel(DRAFT)), choose=parity),
    ):
        with pytest.raises(SettingsError, match="the acceptance rule rapid needs sampled drafts, which the drafter"):
            Request([1, 2], drafter=drafter, acceptance_rule=Rapid())
    Request([1, 2], drafter=Cascade((Jacobi(), DraftModel(DRAFT))), acceptance_rule=Rapid())


def test_greedy_drafts_tell_the_rule_rapid_how_sure_they_were() -> None:
    target, small = tiny_transformer(0), tiny_transformer(0, num_layers=1)
    prompt = [5] * 6 + [7, 8, 9] * 4
    for drafter in (DraftModel(small), Jacobi()):
        # Without the step towards the drafter this is greedy decoding; a large one follows the drafter's preference.
        check_identical(target, [prompt], drafter=drafter, acceptance_rule=Rapid(eta=0.0), tested="drafted")
        kept = []
        for eta in (0.0, 2.0, 50.0):
            (run,) = decode(target, [prompt], drafter=drafter, acceptance_rule=Rapid(eta=eta), max_new_tokens=40)
            kept.append(sum(step.accepted for step in run.trace.steps))
        assert kept[0] <= kept[1] <= kept[2] and kept[0] < kept[2]

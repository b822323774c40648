"""Budget policies: what each computes, what it may look at, and what it must never exceed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

import decodery as dc
from decodery.budget.base import Outlook, Policy
from decodery.budget.confidence import Confidence, entropy_of, top_probability
from decodery.budget.fixed import Fixed
from decodery.core.sequence import Sequence
from decodery.draft.combine import First
from decodery.draft.copyspec import CopySpec
from decodery.draft.draft_model import DraftModel
from decodery.draft.prompt_lookup import PromptLookup
from decodery.errors import SettingsError
from decodery.sample import Sampler
from decodery.testing import LawBroken, TableModel, check_distribution, decode, tiny_transformer
from decodery.verify.rejection import Rejection

TARGET = tiny_transformer(0)
OTHER = tiny_transformer(0, num_layers=1)
PROMPT = [5] * 6 + [7, 8, 9] * 4
SAMPLED = Sampler.from_settings(temperature=1.0)


def nodes(seq: Sequence) -> list[int]:
    return [step.nodes for step in seq.trace.decoding]


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_fixed_is_the_drafter_with_that_length(gamma: int) -> None:
    (bounded,) = decode(TARGET, [PROMPT], drafter=DraftModel(OTHER, length=9), budget=Fixed(gamma))
    assert set(nodes(bounded)[:-3]) == {gamma}
    if gamma:
        (given,) = decode(TARGET, [PROMPT], drafter=DraftModel(OTHER, length=gamma))
        assert nodes(given) == nodes(bounded)


def test_doubt_is_measured_on_the_law() -> None:
    law = torch.tensor([0.0, -math.inf, math.log(3.0), 0.0], dtype=torch.float64) + 5.0
    assert top_probability(law) == pytest.approx(0.6)
    assert entropy_of(law) == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.2)))


@pytest.mark.parametrize(("setting", "most"), [({"probability": 0.0}, 6), ({"probability": 1.0}, 0)])
def test_confidence_at_its_ends_is_fixed(setting: dict[str, float], most: int) -> None:
    (seq,) = decode(
        TARGET, [PROMPT], drafter=DraftModel(OTHER, length=6), budget=Confidence(**setting), max_new_tokens=30
    )
    assert set(nodes(seq)[:-6]) == {most}


def test_confidence_ends_a_chain_before_the_doubtful_draw() -> None:
    drafter = DraftModel(OTHER, length=12)
    (free,) = decode(TARGET, [PROMPT], drafter=drafter, sampler=SAMPLED, max_new_tokens=40)
    asked: list[tuple[int, float]] = []

    @dataclass(frozen=True)
    class Watched(Confidence):
        def goes_on(self, seq: Sequence, outlook: Outlook) -> bool:
            asked.append((outlook.drawn, top_probability(outlook.law)))
            return super().goes_on(seq, outlook)

    (seq,) = decode(TARGET, [PROMPT], drafter=drafter, budget=Watched(0.3), sampler=SAMPLED, max_new_tokens=40)
    assert seq.generated == free.generated
    assert sum(nodes(seq)) < sum(nodes(free))
    # Every step asks at 0, 1, 2, ... and ends at the first doubt.
    for (drawn, chance), (following, _) in itertools.pairwise(asked):
        assert following == (drawn + 1 if chance >= 0.3 else 0) or (following == 0 and drawn > 0)
    assert any(chance < 0.3 for _, chance in asked)


@dataclass(frozen=True)
class Peeking(Policy):
    """Wrong on purpose: drops the draft where the token about to be drawn is the token 0."""

    asks = True

    def goes_on(self, seq: Sequence, outlook: Outlook) -> bool:
        coming = seq.sampler.pick(outlook.law[None], seq.seed, [seq.position + outlook.drawn])
        return int(coming[0]) != 0


def test_a_policy_that_peeks_at_the_coming_draw_is_caught() -> None:
    target, draft = (TableModel(3, seed=seed, order=2) for seed in (0, 7))
    with pytest.raises(LawBroken, match="enumerated law"):
        check_distribution(
            *(target, [1, 2]),
            drafter=DraftModel(draft, length=2),
            budget=Peeking(),
            rule=Rejection(),
            length=4,
            draws=1000,
            least=1e-6,
        )


def test_a_drafter_that_does_not_ask_is_refused() -> None:
    for drafter in (PromptLookup(), First((CopySpec(), PromptLookup()))):
        with pytest.raises(SettingsError, match="the budget Confidence stops a drafter between its draws"):
            decode(TARGET, [PROMPT], drafter=drafter, budget=Confidence())
    decode(TARGET, [PROMPT], drafter=First((CopySpec(), DraftModel(OTHER))), budget=Confidence())


@pytest.mark.parametrize(
    "spec",
    ["fixed:nodes=-1", "fixed:depth=0", "confidence:probability=2", "confidence:entropy=-1", "confidence:longest=0"],
)
def test_bad_settings_are_refused(spec: str) -> None:
    with pytest.raises(SettingsError, match="needs"):
        dc.registry.resolve("budget", spec)

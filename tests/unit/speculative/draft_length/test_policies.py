"""Budget policies: what each computes, what it may look at, and what it must never exceed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

import decodery as dc
from covering import covering
from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError
from decodery.core.requirements import Requirements
from decodery.models.batch import Batch, Segment
from decodery.models.trained.artifact import Artifact
from decodery.sampling import Sampler
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.draft_length.confidence import Confidence, entropy_of, top_probability
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.draft_length.specdec_pp import AcceptanceHead, SpecDecPP
from decodery.speculative.drafters.combine import Cascade
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.draft_length_policy import DraftLengthPolicy, Outlook
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.testing import LawBroken, TableModel, check_distribution, decode, tiny_transformer, to_int8

TARGET = to_int8(tiny_transformer(0))


OTHER = tiny_transformer(0, num_layers=1)


PROMPT = [5] * 6 + [7, 8, 9] * 4


SAMPLED = Sampler.from_settings(temperature=1.0)


def nodes(seq: Sequence) -> list[int]:
    return [step.nodes for step in seq.trace.decoding]


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_fixed_is_the_drafter_with_that_length(gamma: int) -> None:
    (bounded,) = decode(TARGET, [PROMPT], drafter=DraftModel(OTHER, length=9), draft_length=Fixed(gamma))
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
        TARGET, [PROMPT], drafter=DraftModel(OTHER, length=6), draft_length=Confidence(**setting), max_new_tokens=30
    )
    assert set(nodes(seq)[:-6]) == {most}


def test_confidence_ends_a_chain_before_the_doubtful_draw() -> None:
    drafter = DraftModel(OTHER, length=12)
    (free,) = decode(TARGET, [PROMPT], drafter=drafter, sampler=SAMPLED, max_new_tokens=40)
    asked: list[tuple[int, float]] = []

    @dataclass(frozen=True)
    class Watched(Confidence):
        def goes_on(self, seq: Sequence, outlook: Outlook) -> ForwardCoroutine[bool]:
            asked.append((outlook.drawn, top_probability((yield from outlook.law()))))
            return (yield from super().goes_on(seq, outlook))

    (seq,) = decode(TARGET, [PROMPT], drafter=drafter, draft_length=Watched(0.3), sampler=SAMPLED, max_new_tokens=40)
    assert seq.generated == free.generated
    assert sum(nodes(seq)) < sum(nodes(free))
    # Every step asks at 0, 1, 2, ... and ends at the first doubt.
    for (drawn, chance), (following, _) in itertools.pairwise(asked):
        assert following == (drawn + 1 if chance >= 0.3 else 0) or (following == 0 and drawn > 0)
    assert any(chance < 0.3 for _, chance in asked)


@dataclass(frozen=True)
class Peeking(DraftLengthPolicy):
    """Wrong on purpose: drops the draft where the token about to be drawn is the token 0."""

    requirements = Requirements(pauses=True)

    def goes_on(self, seq: Sequence, outlook: Outlook) -> ForwardCoroutine[bool]:
        coming = seq.request.sampler.pick(
            (yield from outlook.law())[None], seq.request.seed, [seq.position + outlook.drawn]
        )
        return int(coming[0]) != 0


def test_a_policy_that_peeks_at_the_coming_draw_is_caught() -> None:
    target, draft = (TableModel(3, seed=seed, order=2, spread=1.0) for seed in (1, 5))
    with pytest.raises(LawBroken, match="enumerated law"):
        check_distribution(
            *(target, [1, 2]),
            drafter=DraftModel(draft, length=2),
            draft_length=Peeking(),
            acceptance_rule=Rejection(),
            length=4,
            draws=200,
            least=1e-6,
        )


def test_a_drafter_that_does_not_ask_is_refused() -> None:
    for drafter in (PromptLookup(), Cascade((CopySpec(), PromptLookup()))):
        with pytest.raises(SettingsError, match="the draft length policy confidence needs a question before each draw"):
            decode(TARGET, [PROMPT], drafter=drafter, draft_length=Confidence())
    decode(TARGET, [PROMPT], drafter=Cascade((CopySpec(), DraftModel(OTHER))), draft_length=Confidence())


@pytest.mark.parametrize(
    "spec",
    ["fixed:nodes=-1", "fixed:depth=0", "confidence:probability=2", "confidence:entropy=-1", "confidence:longest=0"],
)
def test_bad_settings_are_refused(spec: str) -> None:
    with pytest.raises(SettingsError, match="needs"):
        dc.core.registry.resolve("draft-length", spec)


def _head(bias: float = 0.0) -> AcceptanceHead:
    head = AcceptanceHead.random(32, 64)
    head.output[1][1] = bias
    return head


def _drafted(budget: DraftLengthPolicy) -> Sequence:
    settings = {"acceptance_rule": Rejection(), "sampler": SAMPLED, "max_new_tokens": 18}
    return decode(TARGET, [PROMPT], drafter=DraftModel(OTHER, length=20), draft_length=budget, **settings)[0]


@cache
def _fixed(length: int) -> Sequence:
    return _drafted(Fixed(length))


@pytest.mark.parametrize(("bias", "shortest"), covering(list(product((-60.0, 0.0, 60.0), (0, 2, 3))), 1))
def test_thresholds_at_their_ends_are_fixed_lengths(bias: float, shortest: int) -> None:
    # Token for token, also under the rule whose text depends on what was drafted.
    for threshold, length in ((1.0, 5), (0.0, max(shortest, 2))):
        policy = SpecDecPP(_head(bias), threshold, shortest, longest=5)
        stopped, fixed = _drafted(policy), _fixed(length)
        assert (stopped.generated, nodes(stopped)) == (fixed.generated, nodes(fixed))


def test_the_head_judges_every_token_but_the_newest() -> None:
    judged: list[torch.Tensor] = []

    class Watching(AcceptanceHead):
        def acceptance(self, hidden: torch.Tensor) -> float:
            judged.append(hidden)
            return 0.9

    policy = SpecDecPP(Watching.random(32, 64), threshold=1 - 0.9**2.5, longest=9)
    (seq,) = decode(TARGET, [PROMPT], drafter=DraftModel(OTHER, length=9), draft_length=policy, max_new_tokens=12)
    # 0.9 and 0.81 are above the threshold's 0.77, 0.73 is not: three judgements, and a fourth token nobody judged.
    assert nodes(seq)[0] == 4 and len(judged) >= 3
    text = seq.tokens[: len(PROMPT) + 1]
    drafted = decode(OTHER, [text], max_new_tokens=4)[0].generated
    for count in (1, 2, 3):
        read = [*text, *drafted[:count]]
        fresh = OTHER.forward(Batch([Segment.chunk(read, OTHER.new_cache())]), taps=[1]).hidden[1][-1]
        assert (judged[count - 1] - fresh).abs().max() < 1e-9


def test_a_head_is_written_and_read(tmp_path: Path) -> None:
    head, path = _head(0.25), tmp_path / "head.safetensors"
    head.facts["texts"] = 7
    head.save(path)
    again, state = AcceptanceHead.load(path), torch.randn(32)
    assert (again.vocab_size, again.facts) == (64, {"texts": 7})
    assert again.acceptance(state) == pytest.approx(head.acceptance(state), abs=0.02), "weights are kept in bfloat16"
    decode(
        TARGET,
        [PROMPT],
        drafter=DraftModel(OTHER),
        draft_length=dc.core.registry.resolve("draft-length", f"specdec++:head={path}"),
    )
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptFile, match="holds no acceptance head, or is damaged"):
        AcceptanceHead.load(path)
    with pytest.raises(ModelNotFound, match="there is no acceptance head at"):
        AcceptanceHead.load(tmp_path / "missing")


@pytest.mark.parametrize(
    "tensors",
    [
        {"output.weight": torch.zeros(2, 3)},
        {"output.weight": torch.zeros(2, 3), "output.bias": torch.zeros(3)},
        {"output.weight": torch.zeros(2, 3), "output.bias": torch.full((2,), math.nan)},
        {"output.weight": torch.zeros(2, 3), "output.bias": torch.zeros(2), "blocks.1.weight": torch.zeros(3, 3)},
    ],
)
def test_files_that_are_no_heads_are_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    Artifact("acceptance head", tensors, {"vocab_size": 5, "trained": {}}).save(path)
    with pytest.raises(CorruptFile, match=r"holds no acceptance head|not finite"):
        AcceptanceHead.load(path)


def test_a_head_for_another_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="for 65 tokens and the model has 64"):
        decode(TARGET, [PROMPT], drafter=DraftModel(OTHER), draft_length=SpecDecPP(AcceptanceHead.random(32, 65)))
    with pytest.raises(SettingsError, match="reads states of 16 numbers and the draft model has 32"):
        decode(TARGET, [PROMPT], drafter=DraftModel(OTHER), draft_length=SpecDecPP(AcceptanceHead.random(16, 64)))

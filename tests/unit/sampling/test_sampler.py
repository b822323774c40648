"""The sampler: its presets and their order, its states along paths, and its draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as hf

from decodery.core.errors import NumericalError, SettingsError
from decodery.sampling import (
    DRY,
    ORDERS,
    XTC,
    Context,
    LogitsProcessor,
    Mirostat,
    Momentum,
    NoCitation,
    RepetitionPenalty,
    Sampler,
    Stage,
    Temperature,
    TopK,
    TopP,
)
from methods import WARPS
from plain_processors import (
    INF,
    ROWS,
    TRUNCATIONS,
    V,
    contexts_for,
    distinct_rows,
    kept,
    reference_edit,
    seen,
    softmax,
)


def read_again(sampler: Sampler, contexts: Sequence[Context]) -> list[Context]:
    """The contexts with the states that the sampler has there."""
    made = []
    for each in contexts:
        prompt = each.tokens[: each.prompt_length]
        start = sampler.context(prompt, len(prompt), sampler.init(prompt), each.seed)
        made.append(sampler.ahead(start, each.tokens[each.prompt_length :]))
    return made


def test_settings_build_only_what_is_not_neutral_in_the_order_of_the_preset() -> None:
    settings: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical": 0.9,
        "epsilon": 1e-3,
        "eta": 1e-3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "no_repeat_ngram": 3,
        "top_h": 0.5,
        "xtc": 0.5,
        "xtc_threshold": 0.2,
        "dry": 0.8,
        "dry_base": 1.5,
        "dry_allowed": 3,
        "dry_window": 100,
        "dry_breakers": [4],
        "logit_bias": {5: 1.0},
        "min_new_tokens": 2,
        "eos_ids": [0],
    }
    for order, kinds in ORDERS.items():
        # Mirostat takes the place of the other truncations; momentum and no-citation are no settings of other stacks.
        made = [type(processor) for processor in Sampler.from_settings(**settings, order=order).processors]
        assert made == [kind for kind in kinds if kind is not Mirostat]
        known = {type(processor) for processor in WARPS.values()} - {Momentum, NoCitation}
        assert set(kinds) == known and len(set(kinds)) == len(kinds)
    stages = [kind.stage for kind in ORDERS["default"]]
    assert stages == sorted(stages)
    assert Sampler.from_settings(temperature=1.0, top_k=0, top_p=1, repetition_penalty=1.0).processors == ()
    assert Sampler.from_settings().processors == (Temperature(0.0),)
    assert Sampler.from_settings(temperature=0.5, top_p=None).processors == (Temperature(0.5),)


def test_transformers_stages_in_its_order_give_the_hf_preset() -> None:
    rows, contexts = distinct_rows(60), contexts_for(60)
    sampler = Sampler.from_settings(
        temperature=0.7, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2, no_repeat_ngram=2, order="hf"
    )
    processors = [
        hf.RepetitionPenaltyLogitsProcessor(1.2),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(30),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.02),
    ]
    laws = sampler.law(rows, read_again(sampler, contexts))
    for row, context, law in zip(rows, contexts, laws, strict=True):
        theirs = row[None].clone()
        for processor in processors:
            theirs = processor(torch.tensor([context.tokens]), theirs)
        assert torch.equal(theirs[0], law)


def test_the_order_matters_and_a_users_order_is_kept() -> None:
    rows, contexts = distinct_rows(40), contexts_for(40)
    laws = [
        Sampler.from_settings(temperature=2.0, top_p=0.8, order=order).law(rows, contexts)
        for order in ("default", "llamacpp")
    ]
    assert kept(laws[0]) != kept(laws[1])
    by_hand = Sampler(["top-p:p=0.8", Temperature(2.0)])
    assert by_hand.processors == (TopP(0.8), Temperature(2.0))
    assert torch.equal(by_hand.law(rows, contexts), laws[1])


def test_settings_of_one_warp_go_together() -> None:
    assert Sampler.from_settings(temperature=1.0, xtc=0.3, xtc_threshold=0.2).processors == (XTC(0.3, 0.2),)
    steered = Sampler.from_settings(temperature=0.9, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.5, order="llamacpp")
    assert steered.processors == (Temperature(0.9), Mirostat(3.0, 0.5, 1))
    assert Sampler.from_settings(temperature=1.0, mirostat=0, top_k=4).processors == (TopK(4),)
    assert Sampler.from_settings(dry=0.7, dry_breakers=[2]).processors == (DRY(0.7, breakers=(2,)), Temperature(0.0))
    with pytest.raises(SettingsError, match="xtc_threshold has no effect without xtc"):
        Sampler.from_settings(temperature=1.0, xtc_threshold=0.2)
    with pytest.raises(SettingsError, match="mirostat takes the place of every other truncation: leave out top-p"):
        Sampler.from_settings(temperature=1.0, mirostat=2, top_p=0.9)


@pytest.mark.parametrize("settings", [{"order": "gpt"}, {"temperature": -1}, {"top_p": 0}, {"min_new_tokens": -1}])
def test_contradictory_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Sampler.from_settings(**settings)
    with pytest.raises(SettingsError, match="3 is not an instance of a logits-processor method"):
        Sampler([3])  # type: ignore[list-item]


def test_greedy_applies_masks_and_edits_only() -> None:
    rows, contexts = ROWS, contexts_for(len(ROWS))
    sampler = Sampler.from_settings(temperature=0.0, typical=0.2, top_k=1, repetition_penalty=1.5)
    edited = RepetitionPenalty(1.5).process(rows, seen(RepetitionPenalty(1.5), contexts))
    law = sampler.law(rows, read_again(sampler, contexts))
    assert sampler.greedy and torch.equal(law, edited)
    expected = [row.index(max(row)) for row in edited.tolist()]
    assert sampler.pick(law, 3, [0] * len(rows)).tolist() == expected
    probs = sampler.probabilities(law)
    assert probs.argmax(-1).tolist() == expected and torch.equal(probs.sum(-1), torch.ones(len(rows)).double())
    assert not Sampler([]).greedy and Sampler([Temperature(1e-6)]).greedy and not Sampler([Temperature(1e-5)]).greedy
    assert kept(Temperature(0.0).process(edited, contexts)) == [{token} for token in expected]


def test_without_warps_the_law_is_the_models_own() -> None:
    rows = distinct_rows(3)
    assert Sampler().law(rows, contexts_for(3)) is rows
    torch.testing.assert_close(Sampler().probabilities(rows), rows.double().softmax(-1))


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_logits_that_are_no_distribution_are_refused(bad: float) -> None:
    rows = distinct_rows(3)
    rows[1] = bad
    with pytest.raises(NumericalError, match="not a distribution"):
        Sampler.from_settings(temperature=0.8, top_p=0.9).law(rows, contexts_for(3))
    with pytest.raises(ValueError, match="contexts"):
        Sampler().law(rows, contexts_for(2))
    with pytest.raises(NumericalError, match="not a distribution"):
        Sampler.from_settings(temperature=0.0).largest(rows)


def test_the_largest_is_what_a_plain_sampler_picks() -> None:
    plain = Sampler.from_settings(temperature=0.0, top_p=0.9)
    rows = distinct_rows(4).round()  # with ties
    for logits in (rows, rows.double(), rows[:, 1::2]):
        picked = plain.pick(plain.law(logits, contexts_for(4)), 0, range(4)).tolist()
        assert plain.largest(logits) == picked
    assert plain.plain
    # What masks or edits logits has to see them, and what is drawn is no argmax.
    for settings in ({"temperature": 0.0, "repetition_penalty": 1.2}, {"temperature": 1.0}):
        assert not Sampler.from_settings(**settings).plain


@dataclass(frozen=True)
class Fatigue(LogitsProcessor):
    """Raises token 0 by the surprise heard so far, which it keeps as its state."""

    gain: float = 1.0
    stage = Stage.TRUNCATION
    stateful = True

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        warped = logits.clone()
        warped[:, 0] += self.gain * torch.tensor([context.state[0] for context in contexts])
        return warped

    def init(self, prompt: Sequence[int]) -> tuple[float, int]:
        return float(len(prompt)), 0

    def advance(self, state: tuple[float, int], token: int, logprob: float) -> tuple[float, int]:
        return state[0] - logprob, state[1] + 1


def test_states_advance_purely_along_each_path() -> None:
    sampler = Sampler([RepetitionPenalty(1.5), Temperature(2.0), Fatigue(), TopK(3)])
    logits = distinct_rows(4)
    root = sampler.context([5, 6], 2, sampler.init([5, 6]), seed=9)
    assert root.state[1:] == ((), (2.0, 0), ()) and root.position == 0
    left, right = sampler.extend(root, 5, logits[0]), sampler.extend(root, 7, logits[0])
    below = sampler.extend(left, 1, logits[1])
    assert root.state[2] == (2.0, 0) and root.tokens == [5, 6]
    assert below.tokens == [5, 6, 5, 1] and below.position == 2 and below.seed == 9
    # The processor hears the log-probability under its own input: penalised and tempered, not yet truncated.
    heard = Sampler([RepetitionPenalty(1.5), Temperature(2.0)]).law(logits[:1], [root]).log_softmax(-1)[0]
    assert left.state[2] == (pytest.approx(2.0 - float(heard[5])), 1)
    assert right.state[2] == (pytest.approx(2.0 - float(heard[7])), 1)
    assert sampler.after(left, 1, logits[1])[2] == below.state[2]
    # Where the logits are unknown, what hears them stays as it is.
    guess = sampler.ahead(root, [5, 1])
    assert guess.tokens == below.tokens and guess.state[2] == root.state[2] and guess.state[0].tail == (5, 1)
    law = sampler.law(logits[2:], [left, right])
    assert torch.equal(law[:1], sampler.law(logits[2:3], [left]))
    assert not Sampler([TopK(3)]).stateful and Sampler([TopK(3)]).after(root, 1, logits[0]) is root.state


def test_the_history_handed_over_is_copied() -> None:
    tokens = [1, 2]
    context = Sampler().context(tokens, 1, ())
    tokens.append(3)
    assert context.tokens == [1, 2] and context.position == 1


SAMPLERS = [
    Sampler([]),
    Sampler.from_settings(temperature=0.6, top_k=12, top_p=0.95),
    Sampler.from_settings(temperature=1.3, min_p=0.05, presence_penalty=0.7, order="vllm"),
    Sampler.from_settings(temperature=0.9, typical=0.8, repetition_penalty=1.3, order="llamacpp"),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_draws_follow_the_reference_distribution(sampler: Sampler) -> None:
    row, draws = distinct_rows(4)[3], 5_000
    (context,) = read_again(sampler, contexts_for(1, seed=5))
    values = row.tolist()
    for processor in sampler.processors:
        if isinstance(processor, Temperature):
            values = [value / processor.t for value in values]
        elif processor.stage is Stage.EDIT:
            values = reference_edit(processor, values, context)
        else:
            reference = next(each for known, each, _, _ in TRUNCATIONS if type(known) is type(processor))
            allowed = reference(values, *vars(processor).values())
            values = [value if token in allowed else -INF for token, value in enumerate(values)]
    expected = np.array(softmax(values)) * draws
    law = sampler.law(row[None], [context])
    counts = np.bincount(sampler.pick(law.expand(draws, -1), 77, range(draws)).numpy(), minlength=V)
    assert counts[expected == 0].sum() == 0
    # Cells with few expected draws are put together, as the test's approximation asks.
    order = np.argsort(expected)
    rare = order[: int((expected[order].cumsum() < 10).sum()) + 1]
    common = np.setdiff1d(order, rare)
    found = [*counts[common], counts[rare].sum()]
    wanted = [*expected[common], expected[rare].sum()]
    assert len(common) >= 3
    assert stats.chisquare(found, wanted).pvalue > 1e-3
    wrong = np.roll(wanted, 1)
    assert stats.chisquare(found, wrong).pvalue < 1e-6


def test_presets_differ_in_order_only() -> None:
    for first, second in itertools.combinations(ORDERS.values(), 2):
        assert set(first) == set(second) and first != second

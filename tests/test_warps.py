"""Every warp against a plain reference and against transformers; the sampler's order, states and draws."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers.generation import logits_process as hf

from decodery.errors import NumericalError, SettingsError
from decodery.registry import methods
from decodery.sample import (
    DRY,
    ORDERS,
    XTC,
    Context,
    Epsilon,
    Eta,
    FrequencyPenalty,
    LogitBias,
    MinNewTokens,
    MinP,
    Mirostat,
    Momentum,
    NoRepeatNGram,
    PresencePenalty,
    RepetitionPenalty,
    Sampler,
    Stage,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    Warp,
)
from decodery.sample import top_p as top_p_file
from decodery.sample import typical as typical_file
from decodery.sample.prefix import smallest_prefix
from methods import WARPS

V = 50
INF = math.inf


def distinct_rows(count: int, size: int = V, seed: int = 0) -> torch.Tensor:
    """Rows without ties, from flat to peaked."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]).repeat(count)[:count, None]
    return torch.randn(count, size, generator=generator) * scales


def tied_rows() -> torch.Tensor:
    """Rows of whole and half numbers, one-hot rows, equal rows, and rows in which much is excluded already."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(-6, 4, (60, V), generator=generator).float()
    halves = torch.randint(-4, 5, (60, V), generator=generator) / 2
    one_hot = torch.full((12, V), -INF).scatter_(1, torch.arange(12)[:, None], 3.0)
    nearly = torch.zeros(12, V).scatter_(1, torch.arange(12)[:, None], 30.0)
    equal = torch.zeros(1, V)
    holes = whole[:20].masked_fill(torch.rand(20, V, generator=generator) < 0.8, -INF)
    holes[:, 7] = 1.0
    return torch.cat([whole, halves, one_hot, nearly, equal, holes])


ROWS = torch.cat([distinct_rows(200), tied_rows()])


def contexts_for(count: int, seed: int = 0, size: int = V) -> list[Context]:
    """Histories of a few to many tokens, with many repetitions, no two alike."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        tokens = [draw.randrange(min(size, 3) if index % 2 else size) for _ in range(draw.randrange(1, 40))]
        made.append(Context(draw.randrange(len(tokens) + 1), tokens))
    return made


def seen(warp: Warp, contexts: Sequence[Context]) -> list[Context]:
    """The contexts with the state that the warp has there."""
    made = []
    for each in contexts:
        state = warp.init(each.tokens[: each.prompt_length])
        for token in each.tokens[each.prompt_length :]:
            state = warp.advance(state, token, -1.0)
        made.append(Context(each.prompt_length, each.tokens, state, each.seed))
    return made


def read_again(sampler: Sampler, contexts: Sequence[Context]) -> list[Context]:
    """The contexts with the states that the sampler has there."""
    made = []
    for each in contexts:
        prompt = each.tokens[: each.prompt_length]
        start = sampler.context(prompt, len(prompt), sampler.init(prompt), each.seed)
        made.append(sampler.ahead(start, each.tokens[each.prompt_length :]))
    return made


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set((row > -INF).nonzero().flatten().tolist()) for row in logits]


# Plain references: one row as a list in, kept ids or logits out.


def softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


def entropy(probs: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probs if p > 0)


def keep_top_k(row: list[float], k: int) -> set[int]:
    border = sorted(row, reverse=True)[min(k, len(row)) - 1]
    return {i for i, value in enumerate(row) if value >= border and value > -INF}


def keep_top_p(row: list[float], p: float) -> set[int]:
    probs, chosen, mass = softmax(row), set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        if mass >= p:
            break
        chosen.add(i)
        mass += probs[i]
    return chosen


def keep_min_p(row: list[float], p: float) -> set[int]:
    probs = softmax(row)
    return {i for i, prob in enumerate(probs) if prob > 0 and prob >= p * max(probs)}


def keep_typical(row: list[float], mass: float) -> set[int]:
    probs = softmax(row)
    mean = entropy(probs)
    far = {i: abs(-math.log(prob) - mean) for i, prob in enumerate(probs) if prob > 0}
    held, border = 0.0, 0.0
    for i in sorted(far, key=lambda i: far[i]):
        if held >= mass:
            break
        held, border = held + probs[i], far[i]
    return {i for i in far if far[i] <= border + 1e-6}


def keep_above(row: list[float], cutoff: float) -> set[int]:
    probs = softmax(row)
    return {i for i, prob in enumerate(probs) if prob > 0 and (prob >= cutoff or row[i] == max(row))}


def keep_epsilon(row: list[float], cutoff: float) -> set[int]:
    return keep_above(row, cutoff)


def keep_eta(row: list[float], cutoff: float) -> set[int]:
    return keep_above(row, min(cutoff, math.sqrt(cutoff) * math.exp(-entropy(softmax(row)))))


TRUNCATIONS: list[tuple[Warp, Callable[[list[float], Any], set[int]], Any, hf.LogitsProcessor]] = [
    *((TopK(k), keep_top_k, k, hf.TopKLogitsWarper(k)) for k in (1, 2, 7, 49)),
    *((TopP(p), keep_top_p, p, hf.TopPLogitsWarper(p)) for p in (1e-6, 0.3127, 0.9031, 0.98765)),
    *((MinP(p), keep_min_p, p, hf.MinPLogitsWarper(p)) for p in (0.0501, 0.31, 1.0)),
    *((Typical(m), keep_typical, m, hf.TypicalLogitsWarper(m)) for m in (0.2117, 0.9031, 0.98765)),
    *((Epsilon(c), keep_epsilon, c, hf.EpsilonLogitsWarper(c)) for c in (3.1e-4, 0.0231, 0.71)),
    *((Eta(c), keep_eta, c, hf.EtaLogitsWarper(c)) for c in (3.1e-4, 0.0231, 0.71)),
]
NAMES = [repr(case[0]) for case in TRUNCATIONS]


@pytest.mark.parametrize(("warp", "reference", "setting", "processor"), TRUNCATIONS, ids=NAMES)
def test_truncations_equal_the_plain_reference(
    warp: Warp, reference: Callable[[list[float], Any], set[int]], setting: Any, processor: object
) -> None:
    before = ROWS.clone()
    result = warp.warp(ROWS, contexts_for(len(ROWS)))
    assert torch.equal(ROWS, before), "a warp must not change what it is given"
    for row, found, warped in zip(ROWS, kept(result), result, strict=True):
        expected = reference(row.tolist(), setting)
        if not isinstance(warp, TopP | TopK):
            # float32 probabilities vanish where exact ones do not; both documents keep nothing that has none.
            expected = {i for i in expected if row[i] > row.max() - 80}
            found = {i for i in found if row[i] > row.max() - 80}
        assert found == expected
        assert torch.equal(warped[list(found)], row[list(found)])


@pytest.mark.parametrize(("warp", "reference", "setting", "processor"), TRUNCATIONS, ids=NAMES)
@pytest.mark.parametrize("size", [V, 3000])
def test_truncations_equal_transformers(
    warp: Warp, reference: object, setting: object, processor: hf.LogitsProcessor, size: int
) -> None:
    rows = ROWS if size == V else distinct_rows(60, size, seed=3)
    ids = torch.zeros(len(rows), 1, dtype=torch.int64)
    ours, theirs = warp.warp(rows, contexts_for(len(rows))), processor(ids, rows.clone())
    if isinstance(warp, TopP):
        # Among equals at the border transformers keeps whichever its sort left there: compare what is kept by value.
        ours, theirs = ours.sort(dim=-1).values, theirs.sort(dim=-1).values
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [40, 700, 20_000])
@pytest.mark.parametrize("share", [0.05, 0.9, 0.99])
def test_narrowing_down_equals_a_full_sort(size: int, share: float) -> None:
    rows = distinct_rows(18, size, seed=5)
    rows = torch.cat([rows, (rows[:6] * 2).round() / 2, torch.zeros(1, size)])
    context = contexts_for(len(rows))
    assert torch.equal(TopP(share).warp(rows, context), top_p_file._keep_prefix(rows, share))
    log_probs = rows.log_softmax(dim=-1)
    expected = typical_file.entropy(log_probs)
    by_sort = typical_file._keep_nearest(rows, log_probs, expected, share)
    assert torch.equal(Typical(share).warp(rows, context), by_sort)


@given(
    st.lists(st.tuples(st.integers(-40, 40), st.integers(1, 8)), min_size=1, max_size=80),
    st.integers(1, 25),
    st.floats(0.01, 1.0),
)
def test_the_smallest_prefix_is_the_smallest(pairs: list[tuple[int, int]], copies: int, share: float) -> None:
    # Weights are whole numbers, so that sums are exact whatever their order.
    keys = np.array([key for key, _ in pairs] * copies, dtype=np.float32)
    weights = np.array([weight for _, weight in pairs] * copies, dtype=np.float32)
    goal = share * float(weights.sum())
    last, needed = smallest_prefix(keys, weights, goal)
    order = keys.argsort(kind="stable")
    count = int(weights[order].cumsum().searchsorted(goal)) + 1
    assert last == keys[order][count - 1]
    assert needed == int((keys[order][:count] == last).sum())


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    row = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    # Two tokens of mass 0.288 and four of 0.106: 0.7 needs two of the four.
    assert kept(TopP(0.7).warp(row, contexts_for(1))) == [{0, 1, 2, 3}]


def test_the_crossing_token_stays_and_rounding_drops_nothing() -> None:
    halves = torch.tensor([[2.0, 1.0, 1.0]]).log()
    assert kept(TopP(0.5).warp(halves, contexts_for(1))) == [{0}]
    assert kept(TopP(0.5000001).warp(halves, contexts_for(1))) == [{0, 1}]
    flat = torch.zeros(1, 49_152)
    for share in (1 - 1e-12, math.nextafter(1.0, 0.0)):
        assert len(kept(TopP(share).warp(flat, contexts_for(1)))[0]) >= 49_151
        assert len(kept(Typical(share).warp(flat, contexts_for(1)))[0]) == 49_152


def test_typical_may_drop_the_most_probable_token() -> None:
    probs = torch.tensor([[0.4] + [0.6 / 30] * 30]).log()
    assert 0 not in kept(Typical(0.3).warp(probs, contexts_for(1)))[0]


# Penalties, bias and masks.


def reference_edit(warp: Warp, row: list[float], context: Context) -> list[float]:
    output = Counter(context.tokens[context.prompt_length :])
    row = list(row)
    for token in range(len(row)):
        if isinstance(warp, RepetitionPenalty) and token in context.tokens:
            row[token] = row[token] / warp.penalty if row[token] > 0 else row[token] * warp.penalty
        if isinstance(warp, PresencePenalty) and output[token]:
            row[token] -= warp.penalty
        if isinstance(warp, FrequencyPenalty):
            row[token] -= warp.penalty * output[token]
        if isinstance(warp, LogitBias):
            row[token] += dict(warp.bias).get(token, 0.0)
    return row


@pytest.mark.parametrize(
    "warp",
    [
        RepetitionPenalty(1.3),
        RepetitionPenalty(0.7),
        PresencePenalty(0.6),
        PresencePenalty(-1.5),
        FrequencyPenalty(0.4),
        FrequencyPenalty(-0.3),
        LogitBias(((3, -100.0), (7, 2.5))),
    ],
    ids=repr,
)
def test_edits_equal_the_plain_reference(warp: Warp) -> None:
    before, contexts = ROWS.clone(), contexts_for(len(ROWS))
    result = warp.warp(ROWS, seen(warp, contexts))
    expected = [reference_edit(warp, row.tolist(), each) for row, each in zip(ROWS, contexts, strict=True)]
    assert torch.equal(ROWS, before)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def successors(tokens: list[int], size: int) -> set[int]:
    last = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1)
    return {tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last} if starts else set()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_equals_the_plain_reference_and_transformers(size: int) -> None:
    rows, contexts = distinct_rows(200), contexts_for(200)
    result = NoRepeatNGram(size).warp(rows, seen(NoRepeatNGram(size), contexts))
    processor = hf.NoRepeatNGramLogitsProcessor(size)
    banned = 0
    for row, out, context in zip(rows, result, contexts, strict=True):
        gone = successors(context.tokens, size)
        banned += len(gone)
        assert kept(out[None]) == [set(range(V)) - gone]
        assert torch.equal(out[None], processor(torch.tensor([context.tokens]), row[None]))
    assert banned > 10


def test_edits_and_masks_equal_transformers() -> None:
    rows, contexts = ROWS, contexts_for(len(ROWS))
    for penalty in (1.3, 0.7):
        ours = RepetitionPenalty(penalty).warp(rows, seen(RepetitionPenalty(penalty), contexts))
        processor = hf.RepetitionPenaltyLogitsProcessor(penalty)
        for row, out, context in zip(rows, ours, contexts, strict=True):
            assert torch.equal(out[None], processor(torch.tensor([context.tokens]), row[None].clone()))
    for t in (0.31, 1.7):
        assert torch.equal(Temperature(t).warp(rows, contexts), hf.TemperatureLogitsWarper(t)(None, rows))
    bias = {3: -100.0, 7: 2.5}
    biased = hf.SequenceBiasLogitsProcessor({(token,): amount for token, amount in bias.items()})
    ids = torch.zeros(len(rows), 1, dtype=torch.int64)
    assert torch.equal(LogitBias(bias).warp(rows, contexts), biased(ids, rows.clone()))  # type: ignore[arg-type]
    rows = distinct_rows(len(ROWS))
    ours = MinNewTokens(5, (2, 9)).warp(rows, contexts)
    for row, out, context in zip(rows, ours, contexts, strict=True):
        processor = hf.MinNewTokensLengthLogitsProcessor(context.prompt_length, 5, torch.tensor([2, 9]))
        assert torch.equal(out[None], processor(torch.tensor([context.tokens]), row[None]))
    assert len({context.position < 5 for context in contexts}) == 2


def test_a_mask_never_empties_a_row() -> None:
    rows = torch.full((2, 4), -INF)
    rows[:, 1] = 0.5
    contexts = [Context(0, [1, 1, 1]), Context(0, [2, 3, 2, 3])]
    assert torch.equal(NoRepeatNGram(1).warp(rows, seen(NoRepeatNGram(1), contexts)), rows)
    assert torch.equal(MinNewTokens(9, (1,)).warp(rows, contexts), rows)


def test_tokens_beyond_the_vocabulary_are_ignored_in_histories() -> None:
    contexts = [Context(1, [1, 70, 1, 70, 1])]
    rows = torch.zeros(1, 4)
    for warp in (RepetitionPenalty(2.0), PresencePenalty(1.0), FrequencyPenalty(1.0), NoRepeatNGram(1)):
        result = warp.warp(rows, seen(warp, contexts))
        assert result.shape == rows.shape and result[0, 0] == 0


# What holds for every warp.

NEUTRAL: list[Warp] = [
    Temperature(1.0),
    TopK(0),
    TopP(1.0),
    MinP(0.0),
    Typical(1.0),
    Epsilon(0.0),
    Eta(0.0),
    RepetitionPenalty(1.0),
    PresencePenalty(0.0),
    FrequencyPenalty(0.0),
    NoRepeatNGram(0),
    LogitBias(()),
    LogitBias(((3, 0.0),)),
    MinNewTokens(0, (3,)),
    MinNewTokens(5, ()),
    TopH(1.0, top=0),
    XTC(0.0),
    XTC(1.0, 0.51),
    DRY(0.0),
    DRY(window=0),
    Momentum(alpha=0.0),
]


def test_all_registered_warps_are_tested_here() -> None:
    # Mirostat has no setting that leaves everything as it is.
    assert {type(warp) for warp in NEUTRAL} == {method.cls for method in methods("sample")} - {Mirostat}


@pytest.mark.parametrize("warp", NEUTRAL, ids=repr)
def test_neutral_settings_return_the_same_tensor(warp: Warp) -> None:
    assert warp.neutral and warp.warp(ROWS, seen(warp, contexts_for(len(ROWS)))) is ROWS


def test_the_entropy_of_a_row_does_not_depend_on_the_others() -> None:
    log_probs = (distinct_rows(12, 50_000, seed=9) * 2).log_softmax(-1)
    alone = [typical_file.entropy(row[None].clone()) for row in log_probs]
    assert torch.equal(torch.cat(alone), typical_file.entropy(log_probs))
    plain = [entropy(row.double().exp().tolist()) for row in log_probs[:3]]
    assert torch.cat(alone[:3]).flatten().tolist() == pytest.approx(plain, rel=1e-5)
    assert typical_file.entropy(torch.tensor([[0.0, -INF, -INF]])).item() == 0.0


@pytest.mark.parametrize("name", WARPS)
def test_every_row_keeps_a_token_and_no_excluded_one_returns(name: str) -> None:
    result = WARPS[name].warp(ROWS, seen(WARPS[name], contexts_for(len(ROWS))))
    assert all(found for found in kept(result))
    assert all(found <= before for found, before in zip(kept(result), kept(ROWS), strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Temperature(-1), "temperature must be a finite number at least 0, not -1"),
        (lambda: Temperature(INF), "temperature"),
        (lambda: Temperature("hot"), "not 'hot'"),  # type: ignore[arg-type]
        (lambda: TopK(-1), "top-k must be a whole number, 0 or more, not -1"),
        (lambda: TopK(2.5), "top-k"),  # type: ignore[arg-type]
        (lambda: TopP(0), "top-p must be a finite number above 0 and at most 1, not 0"),
        (lambda: TopP(1.01), "top-p"),
        (lambda: TopP(math.nan), "top-p"),
        (lambda: MinP(-0.1), "min-p"),
        (lambda: Typical(0), "typical"),
        (lambda: Epsilon(2), "epsilon"),
        (lambda: Eta(-1), "eta"),
        (lambda: RepetitionPenalty(0), "repetition-penalty must be a finite number above 0, not 0"),
        (lambda: PresencePenalty(INF), "presence-penalty must be a finite number, not inf"),
        (lambda: FrequencyPenalty(True), "frequency-penalty"),
        (lambda: NoRepeatNGram(-2), "no-repeat-ngram"),
        (lambda: LogitBias(((-1, 2.0),)), "a token id of logit-bias"),
        (lambda: LogitBias(((1, -INF),)), "the logit-bias of token 1"),
        (lambda: LogitBias(((1, 2.0), (1, 3.0))), "names a token twice"),
        (lambda: MinNewTokens(-1), "min-new-tokens"),
        (lambda: MinNewTokens(3, (-1,)), "an end token"),
        (lambda: TopH(0), "top-h"),
        (lambda: TopH(top=-1), "top of top-h"),
        (lambda: TopH(bound="full"), "not 'full'"),  # type: ignore[arg-type]
        (lambda: XTC(1.5), "the probability of xtc"),
        (lambda: XTC(0.5, 0), "the threshold of xtc"),
        (lambda: Mirostat(-1), "the tau of mirostat"),
        (lambda: Mirostat(eta=INF), "the eta of mirostat"),
        (lambda: Mirostat(version=3), "versions 1 and 2, not 3"),  # type: ignore[arg-type]
        (lambda: DRY(-1), "the multiplier of dry"),
        (lambda: DRY(base=0.5), "the base of dry"),
        (lambda: DRY(allowed=0), "the allowed length of dry"),
        (lambda: DRY(window=-1), "the window of dry"),
        (lambda: DRY(breakers=(-3,)), "a breaker of dry"),
        (lambda: Momentum(k=0), "momentum needs k >= 1"),
        (lambda: Momentum(alpha=-1), "the alpha of momentum"),
        (lambda: Momentum(resistance=()), "momentum needs"),
        (lambda: LogitBias(((V, 1.0),)).warp(ROWS, contexts_for(len(ROWS))), "vocabulary ends at 49"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(make: Callable[[], object], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert said in str(caught.value) and "\n" not in str(caught.value)


# The sampler.


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
        # Mirostat takes the place of the other truncations, and momentum is no setting of other stacks.
        made = [type(warp) for warp in Sampler.from_settings(**settings, order=order).warps]
        assert made == [kind for kind in kinds if kind is not Mirostat]
        assert set(kinds) == {type(warp) for warp in WARPS.values()} - {Momentum} and len(set(kinds)) == len(kinds)
    stages = [kind.stage for kind in ORDERS["default"]]
    assert stages == sorted(stages)
    assert Sampler.from_settings(temperature=1.0, top_k=0, top_p=1, repetition_penalty=1.0).warps == ()
    assert Sampler.from_settings().warps == (Temperature(0.0),)
    assert Sampler.from_settings(temperature=0.5, top_p=None).warps == (Temperature(0.5),)


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
    assert by_hand.warps == (TopP(0.8), Temperature(2.0))
    assert torch.equal(by_hand.law(rows, contexts), laws[1])


def test_settings_of_one_warp_go_together() -> None:
    assert Sampler.from_settings(temperature=1.0, xtc=0.3, xtc_threshold=0.2).warps == (XTC(0.3, 0.2),)
    steered = Sampler.from_settings(temperature=0.9, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.5, order="llamacpp")
    assert steered.warps == (Temperature(0.9), Mirostat(3.0, 0.5, 1))
    assert Sampler.from_settings(temperature=1.0, mirostat=0, top_k=4).warps == (TopK(4),)
    assert Sampler.from_settings(dry=0.7, dry_breakers=[2]).warps == (DRY(0.7, breakers=(2,)), Temperature(0.0))
    with pytest.raises(SettingsError, match="xtc_threshold has no effect without xtc"):
        Sampler.from_settings(temperature=1.0, xtc_threshold=0.2)
    with pytest.raises(SettingsError, match="mirostat takes the place of every other truncation: leave out top-p"):
        Sampler.from_settings(temperature=1.0, mirostat=2, top_p=0.9)


@pytest.mark.parametrize("settings", [{"order": "gpt"}, {"temperature": -1}, {"top_p": 0}, {"min_new_tokens": -1}])
def test_contradictory_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Sampler.from_settings(**settings)
    with pytest.raises(SettingsError, match="3 is not an instance of a sample method"):
        Sampler([3])  # type: ignore[list-item]


def test_greedy_applies_masks_and_edits_only() -> None:
    rows, contexts = ROWS, contexts_for(len(ROWS))
    sampler = Sampler.from_settings(temperature=0.0, typical=0.2, top_k=1, repetition_penalty=1.5)
    edited = RepetitionPenalty(1.5).warp(rows, seen(RepetitionPenalty(1.5), contexts))
    law = sampler.law(rows, read_again(sampler, contexts))
    assert sampler.greedy and torch.equal(law, edited)
    expected = [row.index(max(row)) for row in edited.tolist()]
    assert sampler.pick(law, 3, [0] * len(rows)).tolist() == expected
    probs = sampler.probabilities(law)
    assert probs.argmax(-1).tolist() == expected and torch.equal(probs.sum(-1), torch.ones(len(rows)).double())
    assert not Sampler([]).greedy and Sampler([Temperature(1e-6)]).greedy and not Sampler([Temperature(1e-5)]).greedy
    assert kept(Temperature(0.0).warp(edited, contexts)) == [{token} for token in expected]


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


@dataclass(frozen=True)
class Fatigue(Warp):
    """Raises token 0 by the surprise heard so far, which it keeps as its state."""

    gain: float = 1.0
    stage = Stage.TRUNCATION
    stateful = True

    def warp(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
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
    # The warp hears the log-probability under its own input: penalised and tempered, not yet truncated.
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
    row, draws = distinct_rows(4)[3], 20_000
    (context,) = read_again(sampler, contexts_for(1, seed=5))
    values = row.tolist()
    for warp in sampler.warps:
        if isinstance(warp, Temperature):
            values = [value / warp.t for value in values]
        elif warp.stage is Stage.EDIT:
            values = reference_edit(warp, values, context)
        else:
            reference = next(each for known, each, _, _ in TRUNCATIONS if type(known) is type(warp))
            allowed = reference(values, *vars(warp).values())
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

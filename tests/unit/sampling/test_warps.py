"""Penalties, bias and masks against a plain reference and transformers, and what holds for every processor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from decodery.core.errors import SettingsError
from decodery.core.registry import methods
from decodery.sampling import (
    DRY,
    XTC,
    Context,
    Epsilon,
    Eta,
    FrequencyPenalty,
    LogitBias,
    LogitsProcessor,
    MinNewTokens,
    MinP,
    Mirostat,
    Momentum,
    NoCitation,
    NoRepeatNGram,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
)
from decodery.sampling import typical as typical_file
from decodery.sampling.no_citation import Citations
from methods import WARPS
from plain_processors import (
    INF,
    ROWS,
    V,
    contexts_for,
    distinct_rows,
    entropy,
    kept,
    reference_edit,
    seen,
)


@pytest.mark.parametrize(
    "processor",
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
def test_edits_equal_the_plain_reference(processor: LogitsProcessor) -> None:
    before, contexts = ROWS.clone(), contexts_for(len(ROWS))
    result = processor.process(ROWS, seen(processor, contexts))
    expected = [reference_edit(processor, row.tolist(), each) for row, each in zip(ROWS, contexts, strict=True)]
    assert torch.equal(ROWS, before)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def successors(tokens: list[int], size: int) -> set[int]:
    last = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1)
    return {tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last} if starts else set()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_equals_the_plain_reference_and_transformers(size: int) -> None:
    rows, contexts = distinct_rows(200), contexts_for(200)
    result = NoRepeatNGram(size).process(rows, seen(NoRepeatNGram(size), contexts))
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
        ours = RepetitionPenalty(penalty).process(rows, seen(RepetitionPenalty(penalty), contexts))
        processor = hf.RepetitionPenaltyLogitsProcessor(penalty)
        for row, out, context in zip(rows, ours, contexts, strict=True):
            assert torch.equal(out[None], processor(torch.tensor([context.tokens]), row[None].clone()))
    for t in (0.31, 1.7):
        assert torch.equal(Temperature(t).process(rows, contexts), hf.TemperatureLogitsWarper(t)(None, rows))
    bias = {3: -100.0, 7: 2.5}
    biased = hf.SequenceBiasLogitsProcessor({(token,): amount for token, amount in bias.items()})
    ids = torch.zeros(len(rows), 1, dtype=torch.int64)
    assert torch.equal(LogitBias(bias).process(rows, contexts), biased(ids, rows.clone()))  # type: ignore[arg-type]
    rows = distinct_rows(len(ROWS))
    ours = MinNewTokens(5, (2, 9)).process(rows, contexts)
    for row, out, context in zip(rows, ours, contexts, strict=True):
        processor = hf.MinNewTokensLengthLogitsProcessor(context.prompt_length, 5, torch.tensor([2, 9]))
        assert torch.equal(out[None], processor(torch.tensor([context.tokens]), row[None]))
    assert len({context.position < 5 for context in contexts}) == 2


def test_a_mask_never_empties_a_row() -> None:
    rows = torch.full((2, 4), -INF)
    rows[:, 1] = 0.5
    contexts = [Context(0, [1, 1, 1]), Context(0, [2, 3, 2, 3])]
    assert torch.equal(NoRepeatNGram(1).process(rows, seen(NoRepeatNGram(1), contexts)), rows)
    assert torch.equal(MinNewTokens(9, (1,)).process(rows, contexts), rows)


def test_tokens_beyond_the_vocabulary_are_ignored_in_histories() -> None:
    contexts = [Context(1, [1, 70, 1, 70, 1])]
    rows = torch.zeros(1, 4)
    for processor in (RepetitionPenalty(2.0), PresencePenalty(1.0), FrequencyPenalty(1.0), NoRepeatNGram(1)):
        result = processor.process(rows, seen(processor, contexts))
        assert result.shape == rows.shape and result[0, 0] == 0


NEUTRAL: list[LogitsProcessor] = [
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
    NoCitation(Citations.of([np.array([1, 2, 3])])),
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
    assert {type(processor) for processor in NEUTRAL} == {method.cls for method in methods("logits-processor")} - {
        Mirostat
    }


@pytest.mark.parametrize("processor", NEUTRAL, ids=repr)
def test_neutral_settings_return_the_same_tensor(processor: LogitsProcessor) -> None:
    assert processor.neutral and processor.process(ROWS, seen(processor, contexts_for(len(ROWS)))) is ROWS


def test_the_entropy_of_a_row_does_not_depend_on_the_others() -> None:
    log_probs = (distinct_rows(12, 50_000, seed=9) * 2).log_softmax(-1)
    alone = [typical_file.entropy(row[None].clone()) for row in log_probs]
    assert torch.equal(torch.cat(alone), typical_file.entropy(log_probs))
    plain = [entropy(row.double().exp().tolist()) for row in log_probs[:3]]
    assert torch.cat(alone[:3]).flatten().tolist() == pytest.approx(plain, rel=1e-5)
    assert typical_file.entropy(torch.tensor([[0.0, -INF, -INF]])).item() == 0.0


@pytest.mark.parametrize("name", WARPS)
def test_every_row_keeps_a_token_and_no_excluded_one_returns(name: str) -> None:
    result = WARPS[name].process(ROWS, seen(WARPS[name], contexts_for(len(ROWS))))
    assert all(found for found in kept(result))
    assert all(found <= before for found, before in zip(kept(result), kept(ROWS), strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Temperature(-1), "temperature must be a finite number at least 0, not -1"),
        (lambda: Temperature(INF), "temperature"),
        (lambda: Temperature("hot"), "not 'hot'"),  # type: ignore[arg-type]
        (lambda: TopK(-1), "top-k must be an integer of at least 0, not -1"),
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
        (lambda: LogitBias(((1, 2.0), (1, 3.0))), "has a token twice"),
        (lambda: MinNewTokens(-1), "min-new-tokens"),
        (lambda: MinNewTokens(3, (-1,)), "an end token"),
        (lambda: TopH(0), "top-h"),
        (lambda: TopH(top=-1), "top of top-h"),
        (lambda: TopH(bound="full"), "not 'full'"),  # type: ignore[arg-type]
        (lambda: XTC(1.5), "the probability of xtc"),
        (lambda: XTC(0.5, 0), "the threshold of xtc"),
        (lambda: Mirostat(-1), "the tau of mirostat"),
        (lambda: Mirostat(eta=INF), "the eta of mirostat"),
        (lambda: Mirostat(version=3), "version must be 1 or 2, not 3"),  # type: ignore[arg-type]
        (lambda: DRY(-1), "the multiplier of dry"),
        (lambda: DRY(base=0.5), "the base of dry"),
        (lambda: DRY(allowed=0), "the allowed length of dry"),
        (lambda: DRY(window=-1), "the window of dry"),
        (lambda: DRY(breakers=(-3,)), "a breaker of dry"),
        (lambda: Momentum(k=0), "momentum needs k >= 1"),
        (lambda: Momentum(alpha=-1), "the alpha of momentum"),
        (lambda: Momentum(resistance=()), "momentum needs"),
        (lambda: LogitBias(((V, 1.0),)).process(ROWS, contexts_for(len(ROWS))), "vocabulary ends at 49"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(make: Callable[[], object], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert said in str(caught.value) and "\n" not in str(caught.value)

"""FTP: who goes around a layer, that rows gathered are those of a masked model, and what is left in the cache."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, SettingsError
from decodery.llm.llm import LLM
from decodery.logits_sources.ftp import FTP, Pruned, PrunedCache, stages
from decodery.models.batch import Batch, Segment
from decodery.models.trained.token_routers import TokenRouters, inputs, least_important, received, uniform
from decodery.step.forward_request import run_sync, score
from decodery.testing import check_identical, decode, tiny_transformer
from decodery.training.ftp import masked, pruned, said
from questions import prompts

TARGET = tiny_transformer(0, num_layers=4)
PROMPT = [5] * 6 + [7, 8, 9] * 4 + [2, 3]
ROUTERS_OF_FOUR = TokenRouters.initial((0.0, 0.5, 0.3, 0.4), 8, seed=1)
STATIC = TokenRouters((0.0, 0.5, 0.3, 0.0))


def test_sparsity_zero_is_the_model_itself() -> None:
    (plain,), (whole,), (less,) = (
        decode(TARGET, [PROMPT], logits_source=source, max_new_tokens=20)
        for source in (None, FTP(sparsity=0.0), FTP(sparsity=0.4))
    )
    assert plain.generated == whole.generated != less.generated
    reader = FTP(sparsity=0.0).over(TARGET, PROMPT)
    own = run_sync(score(reader, Segment.chunk(PROMPT, reader.new_cache()))).logits
    assert torch.equal(own, TARGET.forward(Batch([Segment.chunk(PROMPT, TARGET.new_cache())])).logits)


@pytest.mark.parametrize("routers", [STATIC, ROUTERS_OF_FOUR], ids=["static", "dynamic"])
def test_rows_gathered_are_rows_of_a_masked_model(routers: TokenRouters) -> None:
    tokens = np.array(PROMPT)
    climb, states = pruned(TARGET, routers, 2, tokens)
    assert climb.skips.keys() == {layer for layer, share in enumerate(routers.schedule) if share}
    assert any(each.any() for each in climb.skips.values())
    assert (states - masked(TARGET, tokens, climb.skips)).abs().max() < 1e-10
    # A model that leaves tokens out, and lets others see them in the layers they went around, is another one.
    seen = {layer: torch.zeros_like(each) for layer, each in climb.skips.items()}
    keeps = {layer: (~each).double() for layer, each in climb.skips.items()}
    assert (states - masked(TARGET, tokens, seen, keeps)).abs().max() > 1e-3


def test_the_cache_holds_in_every_layer_what_went_through_it() -> None:
    (seq,) = decode(TARGET, [PROMPT], logits_source=FTP(STATIC, sinks=2), max_new_tokens=6, prefill_chunk=7)
    n, cache = len(PROMPT), seq.cache
    climb, _ = pruned(TARGET, STATIC, 2, np.array(PROMPT))
    assert isinstance(cache, PrunedCache) and cache.next_position == n + 5
    for layer, share in enumerate(STATIC.schedule):
        left = np.setdiff1d(np.arange(n), np.flatnonzero(climb.skips[layer])) if share else np.arange(n)
        expected = [*left.tolist(), *range(n, n + 5)]
        assert cache.lengths[layer] == len(expected) == n - math.floor(share * n) + 5
        assert cache.positions[layer, : len(expected)].tolist() == expected
    layers = sum(n - math.floor(share * n) for share in STATIC.schedule)
    assert seq.trace.ledger.counts == {"layers": layers, "rows": n}


def test_a_prompt_may_come_in_any_parts_and_again() -> None:
    reader = FTP(STATIC, sinks=2).over(TARGET, PROMPT)
    text = [*PROMPT, 11, 12, 13]
    whole = run_sync(score(reader, Segment.chunk(text, reader.new_cache()))).logits
    cache, rows = reader.new_cache(), []
    for first, last in ((0, 5), (5, 6), (6, len(PROMPT) + 1), (len(PROMPT) + 1, len(text))):
        rows.append(run_sync(score(reader, Segment.chunk(text[first:last], cache))).logits)
        cache.keep(range(last - first))
    assert (torch.cat(rows) - whole).abs().max() < 1e-10
    for n in (len(PROMPT) + 1, 9):
        cache.truncate(n)
        again = run_sync(score(reader, Segment.chunk(text[n:], cache, logit_rows=[len(text) - n - 1]))).logits
        assert (again[0] - whole[-1]).abs().max() < 1e-10
        cache.keep([])
        assert cache.next_position == n
    # What is not kept is not held, and a fork goes on by itself.
    clone = cache.fork()
    run_sync(score(reader, Segment.chunk(text[9:], clone, logit_rows=[])))
    clone.keep(range(len(text) - 9))
    assert clone.next_position == len(text) and cache.next_position == 9


def test_importance_is_what_later_tokens_paid_on_average() -> None:
    weights = torch.rand(3, 6, 6, dtype=torch.float64).tril()
    found = received(weights)
    for token in range(5):
        paid = [float(weights[head, row, token]) for head in range(3) for row in range(token + 1, 6)]
        assert float(found[token]) == pytest.approx(sum(paid) / len(paid))
    assert float(found[5]) == pytest.approx(float(weights[:, 5, 5].mean()))


def test_the_static_router_skips_the_least_important_of_those_it_may() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        n, share = int(random.integers(1, 20)), float(random.random())
        importance = torch.from_numpy(random.integers(0, 5, n).astype(np.float32))
        free = torch.from_numpy(random.random(n) < 0.7)
        order = sorted((float(importance[i]), i) for i in range(n) if free[i])
        expected = {i for _, i in order[: math.floor(share * n)]}
        assert set(least_important(importance, share, free).nonzero().flatten().tolist()) == expected
    shown = inputs(torch.tensor([0.5, 0.1, 0.2]), 0.25)
    expected = [[0.0, math.log(2.5), 1.0, 0.25], [0.5, math.log(1.3), 0.0, 0.25], [1.0, math.log(1.6), 0.5, 0.25]]
    assert torch.allclose(shown, torch.tensor(expected))


def test_layers_without_routers_share_passes_and_the_mean_is_what_was_asked_for() -> None:
    assert list(stages((0.0, 0.0, 0.0, 0.5, 0.2, 0.0, 0.0))) == [
        ((0, 1), False), ((2,), True), ((3,), True), ((4,), False), ((5, 6), False),
    ]  # fmt: skip
    assert TokenRouters(uniform(30, 0.2)).sparsity == pytest.approx(0.2)
    with pytest.raises(SettingsError, match="has mean sparsities from 0 to"):
        uniform(4, 0.6)


def test_routers_of_this_model_or_a_sparsity_are_needed(tmp_path: Path) -> None:
    for settings in ({}, {"sparsity": 0.2, "routers": "x"}):
        with pytest.raises(SettingsError, match="decodery train ftp"):
            FTP(**settings)  # type: ignore[arg-type]
    TokenRouters(STATIC.schedule, model="another").save(tmp_path / TokenRouters.FILE)
    for routers in (str(tmp_path), str(tmp_path / "none"), TokenRouters((0.0, 0.5))):
        with pytest.raises(DecoderyError, match="decodery train ftp"):
            decode(TARGET, [[1]], logits_source=FTP(routers))
    ROUTERS_OF_FOUR.save(tmp_path / TokenRouters.FILE)
    found = TokenRouters.load(tmp_path / TokenRouters.FILE)
    assert found.schedule == ROUTERS_OF_FOUR.schedule
    assert all(torch.equal(found.weights[name], each) for name, each in ROUTERS_OF_FOUR.weights.items())
    TokenRouters(STATIC.schedule, {"in.weight": torch.zeros(4, 8, 4)}).save(tmp_path / TokenRouters.FILE)
    with pytest.raises(CorruptFile, match="holds no set of token routers"):
        TokenRouters.load(tmp_path / TokenRouters.FILE)


def test_logits_of_prompt_rows_are_those_of_the_pruned_prompt() -> None:
    reader = Pruned(TARGET, STATIC, 2, tuple(PROMPT))
    _, states = pruned(TARGET, STATIC, 2, np.array(PROMPT))
    found = run_sync(score(reader, Segment.chunk(PROMPT[:9], reader.new_cache(), logit_rows=[8, 3]))).logits
    assert torch.allclose(found, said(TARGET, states)[[8, 3]])


def test_int8_texts_are_the_same_with_drafts_and_in_batches(smollm2_int8: LLM) -> None:
    asked = [prompts(smollm2_int8)[number][:24] for number in (2, 6)]
    source = FTP(sparsity=0.2)
    runs = check_identical(
        smollm2_int8.model, asked, drafter="ngram", logits_source=source, seeds=(1,), max_new_tokens=5, tested="nothing"
    )
    layers, rows = (sum(run.trace.ledger.counts[name] for run in runs) for name in ("layers", "rows"))
    assert 23 < layers / rows < 26

"""Texts under a policy hold no more than they are admitted for, what the policy keeps beside pages included."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.kv_cache.coprocessor import Augmented
from decodery.kv_cache.d2o import D2O
from decodery.kv_cache.evicting import Evicting
from decodery.kv_cache.expected_attention import Expecting
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.quantized import Quantized, Storing
from decodery.kv_cache.tova import TOVA
from decodery.kv_cache.worths import Worths
from decodery.models.batch import Batch, Segment
from decodery.models.cache.account import resident
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.step.cache_policy import CachePolicy
from decodery.testing import tiny_transformer, to_int8
from methods import KVS

PROMPT = np.random.default_rng(3).integers(0, 64, 90).tolist()
CODED = to_int8(tiny_transformer(0, max_positions=256))
CODED.narrow_caches(torch.int8)
MODELS: dict[str, LanguageModel] = {"float64": tiny_transformer(0, max_positions=256), "int8": CODED}
POLICIES = KVS | {"quantized, small groups": Quantized(8, group=2, residual=8), "h2o, nearly all": H2O(0.99)}


def held(model: LanguageModel, kv: CachePolicy) -> tuple[int, list[int]]:
    """What a text is expected to take to its end, and what it holds after each step."""
    engine = Engine(model, prefill_chunk=16)
    text = engine.submit(Request(PROMPT, max_new_tokens=40, cache_policy=kv))
    promised, found = text.cache.more_for(len(PROMPT) + 40), []
    while not text.finished:
        engine.step()
        found.append(resident([text.cache]))
    assert text.error is None and len(text.generated) == 40
    return promised, found


@pytest.mark.parametrize("kv", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("dtype", MODELS)
def test_a_text_holds_no_more_than_it_is_admitted_for(kv: CachePolicy, dtype: str) -> None:
    promised, found = held(MODELS[dtype], kv)
    assert max(found) <= promised


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("expected-attention", Expecting),
        ("coprocessor", Augmented),
        ("h2o, nearly all", Evicting),
        ("quantized, small groups", Storing),
    ],
)
def test_what_is_not_announced_would_show(
    name: str, kind: type[AttentionPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "more_for", AttentionPolicy.more_for)
    promised, found = held(CODED, POLICIES[name])
    assert max(found) > promised


def sealed(model: LanguageModel, method: Quantized) -> tuple[int, int, int]:
    """What a prompt and its policy are expected to take, take while it is read, and integers take afterwards."""
    cache = model.new_cache()
    cache.policy = policy = method.state(model, 100)
    promised, page, most = cache.more_for(100), cache.pages.pool.page_bytes, 0
    right = KVCache.evict

    def evict(cache: KVCache, *about: Any) -> None:
        nonlocal most
        most = max(most, cache.pages.held.size * page + policy.bytes)
        right(cache, *about)

    model.forward(Batch([Segment.chunk(np.arange(100) % 64, cache)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "evict", evict)
        cache.keep(range(100))
    return promised, most, policy.bytes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [1, 3, 32])
@pytest.mark.parametrize("dtype", MODELS)
def test_integers_take_what_is_announced(bits: Literal[8, 4], group: int, dtype: str) -> None:
    model, method = MODELS[dtype], Quantized(bits, group, residual=2)
    promised, most, integers = sealed(model, method)
    config, groups = model.config, 99 // group
    assert integers == config.num_layers * config.num_kv_heads * groups * method.group_bytes(config.head_dim)
    assert integers <= most <= promised


def test_pages_that_stay_for_a_window_pay_for_no_integers() -> None:
    model = MODELS["int8"]
    assert isinstance(model, Transformer)
    config = replace(model.config, num_layers=2, sliding_window=80, sliding_layers=(True, False))
    windowed = to_int8(Transformer(config, tiny_transformer(0, max_positions=256).weights))
    windowed.narrow_caches(torch.int8)
    promised, most, _ = sealed(windowed, Quantized(8, 1, residual=2))
    assert most <= promised


def test_queries_that_are_kept_of_a_prompt_count() -> None:
    model = tiny_transformer(0)
    # Of the last window and block, of a block of sums, and of the observed end.
    for name, rows in (("actqkv", 16), ("expected-attention", 32), ("snapkv", 0)):
        engine = Engine(model, prefill_chunk=16)
        text = engine.submit(Request(PROMPT[:40], max_new_tokens=2, cache_policy=KVS[name]))
        beside = []
        while not text.finished:
            engine.step()
            beside.append(resident([text.cache]) - text.cache.pages.held.size * text.cache.pages.pool.page_bytes)
        assert beside[-1] == 0
        row = model.config.num_layers * model.config.num_heads * model.config.head_dim * 8
        assert max(beside) == rows * row


LONG = {
    "float64": tiny_transformer(0, num_layers=4, max_positions=2048),
    "int8": to_int8(tiny_transformer(0, num_layers=6, max_positions=2048)),
}
SCORED = {"h2o": H2O(0.9), "tova": TOVA(0.9), "d2o": D2O(0.9, dense=1), "d2o, nothing merged": D2O(0.9, merge="none")}
READ = 1500


def tree_pass(model: LanguageModel, kv: CachePolicy) -> tuple[int, int, int]:
    """What a pass with a tree of 64 drafted nodes is expected to take beside pages, takes at most, and is said to."""
    cache, draw = model.new_cache(), np.random.default_rng(5)
    cache.policy = policy = kv.state(model, READ)
    tokens = draw.integers(0, 64, READ + 65)
    for first in (*range(0, READ, 500), READ, READ + 1):
        last = min(first + 500, READ) if first < READ else first + 1
        model.forward(Batch([Segment.chunk(tokens[first:last], cache)]))
        cache.keep(range(last - first))
    # Three nodes below each: most rows are of no path that is accepted.
    parents = (np.arange(65) - 1) // 3
    mask = np.eye(65, dtype=bool)
    for row in range(1, 65):
        mask[row] |= mask[parents[row]]
    segment = Segment(cache.next_position + mask.sum(axis=1) - 1, tokens[-65:], mask=mask, cache=cache)
    promised = policy.more_for(cache, cache.length + 65, 65, 512)
    tracemalloc.start()
    try:
        before = policy.bytes
        model.forward(Batch([segment]))
        said = policy.bytes - before
        cache.keep([0, 1, 4, 13])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return promised, peak, said


# Slots, mask and logits of 65 rows.
SLACK = 400_000


@pytest.mark.parametrize("kv", SCORED.values(), ids=SCORED)
@pytest.mark.parametrize("dtype", LONG)
def test_a_tree_takes_no_more_than_is_announced(kv: CachePolicy, dtype: str) -> None:
    promised, peak, said = tree_pass(LONG[dtype], kv)
    assert said <= promised
    assert peak <= promised + SLACK
    # Nor much less, or texts would wait for memory that nobody takes.
    assert said > promised / 2


def test_scores_of_one_row_alone_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Worths.most_bytes
    monkeypatch.setattr(Worths, "most_bytes", lambda *about, newest: right(*about[:-1], 1, newest=newest))
    promised, peak, _ = tree_pass(LONG["int8"], SCORED["h2o"])
    assert peak > promised + SLACK


@pytest.mark.parametrize(("kv", "heads"), [(SCORED["h2o"], 2), (SCORED["tova"], 1)], ids=["h2o", "tova"])
def test_what_rows_add_to_scores_is_kept_once(kv: CachePolicy, heads: int) -> None:
    """In 32 bits, of one head where all have the same; sums are there for one layer at a time."""
    _, _, said = tree_pass(LONG["int8"], kv)
    slots = READ + 2 - int(0.1 * (READ + 2)) + 65
    # Scores of content have got room for 64 slots more.
    assert said == 65 * slots * (6 * heads * 4 + 2 * 8) + 64 * 6 * 2 * 8
